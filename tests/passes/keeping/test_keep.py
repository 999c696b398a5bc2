"""What is kept, against every way to keep."""
from __future__ import annotations

import itertools

import pytest

from passes.errors import Infeasible
from passes.keeping import ilp
from passes.keeping.keep import TooSmall, keep
from passes.keeping.tape import Run, Storage, Tape
from passes.keeping.walk import walk
from passes.solve.solvers import SolverOptions
from tests.passes.keeping.tapes import chain, random_tape


def every_walk(tape):
    free = [s for s in tape.candidates if s not in tape.bound_to_keep]
    for count in range(len(free) + 1):
        for chosen in itertools.combinations(free, count):
            yield walk(tape, {*chosen, *tape.bound_to_keep})


def test_what_fits_is_kept_as_suggested():
    tape = chain([10, 20, 30])
    answer = keep(tape, 1000, suggested=[frozenset({1, 2})])
    assert answer.storages == {1, 2} and answer.solves == 0


def test_the_cheapest_that_fits():
    tape = chain([10] * 6, us=[1, 1, 50, 1, 1, 1])
    answer = keep(tape, 50)
    assert answer.walk.peak <= 50
    assert 3 in answer.storages, "what takes longest to compute is kept"


def test_to_keep_nothing_is_an_answer():
    runs = (Run("cheap", False, 1.0, (0,), (1,)), Run("back", True, 1.0, (2, 1), (3,)))
    storages = (Storage("x", 0, None, "forward"), Storage("cheap", 8, 0, "", 5.0), Storage("tangents", 0, None, "backward"),
                Storage("back", 1, 1))
    tape = Tape(runs, storages, frozenset(), frozenset({3}))
    assert ilp.solve(walk(tape, {1}), 10, SolverOptions(), 5.0) == frozenset()
    assert keep(tape, 10).storages == frozenset(), "to run it again takes less than to write and read it"


def test_a_budget_that_nothing_meets_names_the_least_that_works():
    tape = chain([10, 20, 30])
    with pytest.raises(Infeasible, match="holds 80 bytes at least") as caught:
        keep(tape, 25)
    assert isinstance(caught.value, TooSmall) and caught.value.walk.peak == min(w.peak for w in every_walk(tape)) == 80


def test_random_numbers_are_kept():
    tape = next(t for t in map(random_tape, range(20)) if t.bound_to_keep)
    assert keep(tape, 10**6).storages >= tape.bound_to_keep


def test_of_random_tapes_every_budget_that_can_be_met_is_met_at_nearly_the_least_cost():
    ratios = []
    for seed in range(12):
        tape = random_tape(seed)
        walks = list(every_walk(tape))
        peaks = sorted({each.peak for each in walks})
        for budget in {peaks[0], peaks[len(peaks) // 3], peaks[-1]}:
            best = min(each.us for each in walks if each.peak <= budget)
            answer = keep(tape, budget, SolverOptions(time_limit_s=10)).walk
            assert answer.peak <= budget
            ratios.append((answer.us + 1) / (best + 1))
    assert sum(ratio < 1.001 for ratio in ratios) >= 0.8 * len(ratios) and max(ratios) < 2.5, ratios
