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
from tests.passes.checkpointing.storage_programs import chain, random_program


def every_walk(program):
    free = [s for s in program.candidates if s not in program.bound_to_keep | program.never_saved]
    for kept in subsets(free):
        for offloaded in subsets(program.offloadable.intersection({*kept, *program.bound_to_keep})):
            yield simulate_memory(program, {*kept, *program.bound_to_keep}, offloaded)


def subsets(of):
    return itertools.chain.from_iterable(itertools.combinations(of, count) for count in range(len(of) + 1))


def test_what_fits_is_kept_as_suggested():
    program = chain([10, 20, 30])
    answer = choose_saved(program, 1000, suggested=[frozenset({1, 2})])
    assert answer.storages == {1, 2} and answer.solves == 0


def test_the_cheapest_that_fits():
    program = chain([10] * 6, us=[1, 1, 50, 1, 1, 1])
    answer = choose_saved(program, 50)
    assert answer.walk.peak <= 50
    assert 3 in answer.storages, "what takes longest to compute is kept"


def test_to_keep_nothing_is_an_answer():
    runs = (ProgramOp("cheap", False, 1.0, (0,), (1,)), ProgramOp("back", True, 1.0, (2, 1), (3,)))
    storages = (Storage("x", 0, None, "forward"), Storage("cheap", 8, 0, "", 5.0), Storage("tangents", 0, None, "backward"),
                Storage("back", 1, 1))
    program = StorageProgram(runs, storages, frozenset(), frozenset({3}))
    nothing = frozenset(), frozenset()
    assert checkpoint_ilp.solve(simulate_memory(program, {1}), 10, SolverOptions(), WorkLimit(5.0)) == nothing
    assert choose_saved(program, 10).storages == frozenset(), "to run it again takes less than to write and read it"


def test_a_budget_that_nothing_meets_names_the_least_that_works():
    program = chain([10, 20, 30])
    with pytest.raises(Infeasible, match="needs at least 80 bytes") as caught:
        choose_saved(program, 25)
    assert isinstance(caught.value, BudgetTooSmall) and caught.value.walk.peak == min(w.peak for w in every_walk(program)) == 80


def test_random_numbers_are_kept():
    program = next(t for t in map(random_program, range(20)) if t.bound_to_keep)
    assert choose_saved(program, 10**6).storages >= program.bound_to_keep


def test_what_is_cheaper_to_offload_than_to_compute_again_is_offloaded():
    program = chain([10] * 6, us=[9] * 6, offload_us=[inf, inf, 2, inf, inf, inf])
    answer = choose_saved(program, 60)
    assert answer.offloaded == {3} and answer.walk.us == 2 and answer.walk.peak <= 60
    plenty = choose_saved(program, 1000, suggested=[frozenset(program.candidates)])
    assert plenty.offloaded == frozenset(), "not where there is room"


def test_what_takes_longer_to_offload_than_to_compute_again_is_only_offloaded_where_nothing_else_fits():
    runs = (ProgramOp("wide", False, 1.0, (0,), (1,)), ProgramOp("narrow", False, 1.0, (1,), (2,)),
            ProgramOp("big", False, 1.0, (2,), (3,)),
            ProgramOp("bigger", False, 1.0, (3,), (4,)), ProgramOp("gradient", True, 1.0, (5,), (6,)),
            ProgramOp("back", True, 1.0, (6, 2), (7,)))
    sizes = 0, 80, 10, 35, 60, 0, 25, 5
    makers, given = (None, 0, 1, 2, 3, None, 4, 5), {0: "forward", 5: "backward"}
    storages = tuple(Storage(str(k), size, makers[k], given.get(k, ""), 0.0, 50.0 if k == 2 else inf)
                     for k, size in enumerate(sizes))
    program = StorageProgram(runs, storages, frozenset({4}), frozenset({7}))
    for budget, offloaded in (105, set()), (100, {2}):
        answer = choose_saved(program, budget)
        assert answer.walk.peak <= budget and answer.offloaded == offloaded, budget


def test_random_numbers_can_be_offloaded():
    runs = (ProgramOp("mask", False, 1.0, (0,), (1,), False), ProgramOp("big", False, 1.0, (0,), (2,)),
            ProgramOp("back", True, 1.0, (3, 1), (4,)))
    storages = (Storage("x", 0, None, "forward"), Storage("mask", 8, 0, "", 0.0, 3.0), Storage("big", 8, 1),
                Storage("tangents", 0, None, "backward"), Storage("back", 1, 2))
    program = StorageProgram(runs, storages, frozenset(), frozenset({4}))
    assert (choose_saved(program, 9).walk.saved, choose_saved(program, 9).offloaded) == ({1}, frozenset())


def told(program, seed):
    """The same, of which the script says something about some."""
    draw = random.Random(seed)
    said = [draw.choice(["", "", "", "keep", "again"]) if program.is_forward(s) else "" for s in range(len(program.storages))]
    storages = tuple(replace(each, pinned=word) for each, word in zip(program.storages, said, strict=True))
    return replace(program, storages=storages)


def test_what_the_script_says_of_a_value_is_done():
    program = chain([10] * 6)
    again = replace(program, storages=tuple(replace(each, pinned={2: "again", 4: "keep"}.get(s, ""))
                                         for s, each in enumerate(program.storages)))
    assert again.bound_to_keep == {4} and again.never_saved == {2}
    for budget in (10**6, 70, 60):
        answer = choose_saved(again, budget, suggested=[frozenset({1, 2, 3})])
        assert 4 in answer.storages and 2 not in answer.storages


def test_others_have_their_bytes_when_forward_is_over():
    program = chain([10] * 6)
    alone, shared = choose_saved(program, 70), choose_saved(replace(program, between_bytes=30), 70)
    assert alone.walk.between > 40 >= shared.walk.between - 30
    assert shared.walk.peak <= 70


@pytest.mark.parametrize("offloading", [False, True])
def test_of_random_programs_every_budget_that_can_be_met_is_met_at_nearly_the_least_cost(offloading):
    ratios = []
    for seed in range(12):
        program = random_program(seed, offloading=offloading)
        program = program if seed % 2 else told(program, seed)
        walks = list(every_walk(program))
        peaks = sorted({each.peak for each in walks})
        for budget in {peaks[0], peaks[len(peaks) // 3], peaks[-1]}:
            best = min(each.us for each in walks if each.peak <= budget)
            answer = choose_saved(program, budget, SolverOptions(time_limit_s=10)).walk
            assert answer.peak <= budget
            ratios.append((answer.us + 1) / (best + 1))
    assert sum(ratio < 1.001 for ratio in ratios) >= 0.8 * len(ratios) and max(ratios) < 2.5, ratios


@pytest.mark.parametrize("seed", range(12))
def test_what_is_named_as_the_least_is_found(seed):
    program = random_program(seed, layers=8)
    with pytest.raises(BudgetTooSmall) as caught:
        choose_saved(program, 1.0)
    assert caught.value.walk is not None
    least = caught.value.walk.peak
    assert choose_saved(program, float(least)).walk.peak <= least


def test_what_is_not_tried_would_not_lower_the_peak():
    """But for what it changes of what is fused, which is seldom."""
    tried, lower = 0, 0
    for seed in range(12):
        program = layered(seed, 3)
        for kept in (frozenset(), frozenset(program.candidates[::2])):
            before = simulate_memory(program, kept)
            walks = [simulate_memory(program, before.saved ^ {s}) for s in set(program.candidates) - can_lower_peak(before)]
            tried, lower = tried + len(walks), lower + sum(each.peak < before.peak for each in walks)
    assert tried > 50 and lower <= 0.01 * tried


def test_no_program_is_solved_twice(monkeypatch):
    solved, solve = [], checkpoint_ilp.solve

    def solve_once(around, budget_bytes, options, allowance, offloading=True):
        solved.append((around.saved, around.offloaded, budget_bytes, offloading and bool(around.program.offloadable)))
        return solve(around, budget_bytes, options, allowance, offloading)

    monkeypatch.setattr(checkpoint_ilp, "solve", solve_once)
    for seed in range(4):
        program = random_program(seed, layers=8)
        with pytest.raises(BudgetTooSmall):
            choose_saved(program, 1.0)
        assert len(set(solved)) == len(solved) > 1
        solved.clear()


def test_how_much_is_looked_at_is_counted_and_time_that_cuts_it_short_is_told(monkeypatch, caplog):
    program = random_program(3, layers=8)
    caplog.set_level("INFO", logger="hpml")
    monkeypatch.setattr(checkpoint_search, "MOST_WALKED", 0)
    with pytest.raises(BudgetTooSmall):
        choose_saved(program, 1.0)
    assert "cut short" not in caplog.text
    monkeypatch.undo()
    with pytest.raises(BudgetTooSmall):
        choose_saved(program, 1.0, SolverOptions(time_limit_s=1e-9))
    assert caplog.text.count("cut short by the time limit") == 1
