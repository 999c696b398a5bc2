"""The chosen saved values, against every possible choice."""
from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import inf

import pytest

from passes.checkpointing import checkpoint_ilp, checkpoint_search
from passes.checkpointing.checkpoint_search import BudgetTooSmall, choose_saved
from passes.checkpointing.peak_moves import can_lower_peak
from passes.errors import Infeasible
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import ProgramOp, Storage, StorageProgram
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit
from tests.passes.checkpointing.layered import layered
from tests.passes.checkpointing.tapes import chain, random_tape


def every_walk(tape):
    free = [s for s in tape.candidates if s not in tape.bound_to_keep | tape.never_kept]
    for kept in subsets(free):
        for offloaded in subsets(tape.offloadable.intersection({*kept, *tape.bound_to_keep})):
            yield simulate_memory(tape, {*kept, *tape.bound_to_keep}, offloaded)


def subsets(of):
    return itertools.chain.from_iterable(itertools.combinations(of, count) for count in range(len(of) + 1))


def test_what_fits_is_kept_as_suggested():
    tape = chain([10, 20, 30])
    answer = choose_saved(tape, 1000, suggested=[frozenset({1, 2})])
    assert answer.storages == {1, 2} and answer.solves == 0


def test_the_cheapest_that_fits():
    tape = chain([10] * 6, us=[1, 1, 50, 1, 1, 1])
    answer = choose_saved(tape, 50)
    assert answer.walk.peak <= 50
    assert 3 in answer.storages, "what takes longest to compute is kept"


def test_to_keep_nothing_is_an_answer():
    runs = (ProgramOp("cheap", False, 1.0, (0,), (1,)), ProgramOp("back", True, 1.0, (2, 1), (3,)))
    storages = (Storage("x", 0, None, "forward"), Storage("cheap", 8, 0, "", 5.0), Storage("tangents", 0, None, "backward"),
                Storage("back", 1, 1))
    tape = StorageProgram(runs, storages, frozenset(), frozenset({3}))
    assert checkpoint_ilp.solve(simulate_memory(tape, {1}), 10, SolverOptions(), WorkLimit(5.0)) == (frozenset(), frozenset())
    assert choose_saved(tape, 10).storages == frozenset(), "to run it again takes less than to write and read it"


def test_a_budget_that_nothing_meets_names_the_least_that_works():
    tape = chain([10, 20, 30])
    with pytest.raises(Infeasible, match="needs at least 80 bytes") as caught:
        choose_saved(tape, 25)
    assert isinstance(caught.value, BudgetTooSmall) and caught.value.walk.peak == min(w.peak for w in every_walk(tape)) == 80


def test_random_numbers_are_kept():
    tape = next(t for t in map(random_tape, range(20)) if t.bound_to_keep)
    assert choose_saved(tape, 10**6).storages >= tape.bound_to_keep


def test_what_is_cheaper_to_offload_than_to_compute_again_is_offloaded():
    tape = chain([10] * 6, us=[9] * 6, offload_us=[inf, inf, 2, inf, inf, inf])
    answer = choose_saved(tape, 60)
    assert answer.offloaded == {3} and answer.walk.us == 2 and answer.walk.peak <= 60
    assert choose_saved(tape, 1000, suggested=[frozenset(tape.candidates)]).offloaded == frozenset(), "not where there is room"


def test_what_takes_longer_to_offload_than_to_compute_again_is_only_offloaded_where_nothing_else_fits():
    runs = (ProgramOp("wide", False, 1.0, (0,), (1,)), ProgramOp("narrow", False, 1.0, (1,), (2,)),
            ProgramOp("big", False, 1.0, (2,), (3,)),
            ProgramOp("bigger", False, 1.0, (3,), (4,)), ProgramOp("gradient", True, 1.0, (5,), (6,)),
            ProgramOp("back", True, 1.0, (6, 2), (7,)))
    sizes = 0, 80, 10, 35, 60, 0, 25, 5
    makers, given = (None, 0, 1, 2, 3, None, 4, 5), {0: "forward", 5: "backward"}
    storages = tuple(Storage(str(k), size, makers[k], given.get(k, ""), 0.0, 50.0 if k == 2 else inf)
                     for k, size in enumerate(sizes))
    tape = StorageProgram(runs, storages, frozenset({4}), frozenset({7}))
    for budget, offloaded in (105, set()), (100, {2}):
        answer = choose_saved(tape, budget)
        assert answer.walk.peak <= budget and answer.offloaded == offloaded, budget


def test_random_numbers_can_be_offloaded():
    runs = (ProgramOp("mask", False, 1.0, (0,), (1,), False), ProgramOp("big", False, 1.0, (0,), (2,)),
            ProgramOp("back", True, 1.0, (3, 1), (4,)))
    storages = (Storage("x", 0, None, "forward"), Storage("mask", 8, 0, "", 0.0, 3.0), Storage("big", 8, 1),
                Storage("tangents", 0, None, "backward"), Storage("back", 1, 2))
    tape = StorageProgram(runs, storages, frozenset(), frozenset({4}))
    assert (choose_saved(tape, 9).walk.kept, choose_saved(tape, 9).offloaded) == ({1}, frozenset())


def told(tape, seed):
    """The same, of which the script says something about some."""
    draw = random.Random(seed)
    said = [draw.choice(["", "", "", "keep", "again"]) if tape.is_forward(s) else "" for s in range(len(tape.storages))]
    return replace(tape, storages=tuple(replace(each, said=word) for each, word in zip(tape.storages, said, strict=True)))


def test_what_the_script_says_of_a_value_is_done():
    tape = chain([10] * 6)
    again = replace(tape, storages=tuple(replace(each, said={2: "again", 4: "keep"}.get(s, ""))
                                         for s, each in enumerate(tape.storages)))
    assert again.bound_to_keep == {4} and again.never_kept == {2}
    for budget in (10**6, 70, 60):
        answer = choose_saved(again, budget, suggested=[frozenset({1, 2, 3})])
        assert 4 in answer.storages and 2 not in answer.storages


def test_others_have_their_bytes_when_forward_is_over():
    tape = chain([10] * 6)
    alone, shared = choose_saved(tape, 70), choose_saved(replace(tape, between_bytes=30), 70)
    assert alone.walk.between > 40 >= shared.walk.between - 30
    assert shared.walk.peak <= 70


@pytest.mark.parametrize("offloading", [False, True])
def test_of_random_tapes_every_budget_that_can_be_met_is_met_at_nearly_the_least_cost(offloading):
    ratios = []
    for seed in range(12):
        tape = random_tape(seed, offloading=offloading)
        tape = tape if seed % 2 else told(tape, seed)
        walks = list(every_walk(tape))
        peaks = sorted({each.peak for each in walks})
        for budget in {peaks[0], peaks[len(peaks) // 3], peaks[-1]}:
            best = min(each.us for each in walks if each.peak <= budget)
            answer = choose_saved(tape, budget, SolverOptions(time_limit_s=10)).walk
            assert answer.peak <= budget
            ratios.append((answer.us + 1) / (best + 1))
    assert sum(ratio < 1.001 for ratio in ratios) >= 0.8 * len(ratios) and max(ratios) < 2.5, ratios


@pytest.mark.parametrize("seed", range(12))
def test_what_is_named_as_the_least_is_found(seed):
    tape = random_tape(seed, layers=8)
    with pytest.raises(BudgetTooSmall) as caught:
        choose_saved(tape, 1.0)
    assert caught.value.walk is not None
    least = caught.value.walk.peak
    assert choose_saved(tape, float(least)).walk.peak <= least


def test_what_is_not_tried_would_not_lower_the_peak():
    """But for what it changes of what is fused, which is seldom."""
    tried, lower = 0, 0
    for seed in range(12):
        tape = layered(seed, 3)
        for kept in (frozenset(), frozenset(tape.candidates[::2])):
            before = simulate_memory(tape, kept)
            walks = [simulate_memory(tape, before.kept ^ {s}) for s in set(tape.candidates) - can_lower_peak(before)]
            tried, lower = tried + len(walks), lower + sum(each.peak < before.peak for each in walks)
    assert tried > 50 and lower <= 0.01 * tried


def test_no_program_is_solved_twice(monkeypatch):
    solved, solve = [], checkpoint_ilp.solve

    def solve_once(around, budget_bytes, options, allowance, offloading=True):
        solved.append((around.kept, around.offloaded, budget_bytes, offloading and bool(around.tape.offloadable)))
        return solve(around, budget_bytes, options, allowance, offloading)

    monkeypatch.setattr(checkpoint_ilp, "solve", solve_once)
    for seed in range(4):
        tape = random_tape(seed, layers=8)
        with pytest.raises(BudgetTooSmall):
            choose_saved(tape, 1.0)
        assert len(set(solved)) == len(solved) > 1
        solved.clear()


def test_how_much_is_looked_at_is_counted_and_time_that_cuts_it_short_is_told(monkeypatch, caplog):
    tape = random_tape(3, layers=8)
    caplog.set_level("INFO", logger="hpml")
    monkeypatch.setattr(checkpoint_search, "MOST_WALKED", 0)
    with pytest.raises(BudgetTooSmall):
        choose_saved(tape, 1.0)
    assert "cut short" not in caplog.text
    monkeypatch.undo()
    with pytest.raises(BudgetTooSmall):
        choose_saved(tape, 1.0, SolverOptions(time_limit_s=1e-9))
    assert caplog.text.count("cut short by the time limit") == 1
