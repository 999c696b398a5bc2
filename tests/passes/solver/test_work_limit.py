"""Counted work -> the end of a search, independent of the clock."""
from __future__ import annotations

import logging
import time

import pytest

from passes.solver import SolverOptions, solve
from passes.solver.work_limit import GUARD, SLACK_S, US, OutOfTime, WorkLimit
from tests.passes.solver.random_problems import hard_chain, recurrences


def test_a_part_counts_towards_the_whole_and_tells_it_that_it_was_over():
    whole = WorkLimit(3.0)
    part = whole.part(1.0)
    part.spend("hop", 0.5e6 / US["hop"])
    assert (part.left_s, whole.left_s) == pytest.approx((0.5, 2.5)) and part.allows("hop") and not part.is_over
    assert not part.allows("hop", 0.6e6 / US["hop"])
    part.take(0.6)
    assert not whole.was_over
    assert part.is_over and not whole.is_over and whole.was_over


def test_one_that_is_strict_raises_when_it_is_used_up():
    strict = WorkLimit(1.0).part(1e-6, strict=True)
    strict.spend("comparison")
    with pytest.raises(OutOfTime):
        strict.spend("hop", 10)


def test_cpu_time_ends_what_is_counted_wrong_by_far_and_that_is_told_once(caplog):
    now = [100.0]
    whole = WorkLimit(10.0, cpu_s=lambda: now[0])
    part = whole.part(1.0)
    now[0] += 10.0 * GUARD + SLACK_S - 1
    assert not part.is_over
    now[0] += 2
    with caplog.at_level(logging.WARNING, logger="hpml"):
        assert part.is_over and part.is_over
    assert caplog.text.count("CPU time") == 1 and whole.was_over


@pytest.mark.parametrize("seconds", [0.005, 0.1, 0.2])
def test_what_a_search_with_little_time_finds_does_not_depend_on_the_clock(monkeypatch, seconds):
    """Cut in the rounding, in the relaxation or the branching: on a machine that stands still for an hour at every look at the
    clock, the same assignment, bound and gap."""
    options = SolverOptions(gap=0.0, time_limit_s=seconds)
    quiet = solve(hard_chain(), options)
    hours = iter(range(10**9))
    for clock in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, clock, lambda: 3600.0 * next(hours))
    busy = solve(hard_chain(), options)
    assert quiet.status == "feasible" and quiet.gap > 0
    assert (busy.chosen, busy.cost, busy.bound, busy.gap) == (quiet.chosen, quiet.cost, quiet.bound, quiet.gap)


def test_a_program_whose_root_node_would_not_end_in_time_is_answered_without_branching():
    """HiGHS makes cuts for minutes there, and looks at no limit meanwhile."""
    began = time.thread_time()
    answer = solve(recurrences(8), SolverOptions(time_limit_s=2.0))  # verified by `solve`
    assert time.thread_time() - began < 4 * 2.0
    assert answer.status == "feasible" and 0 < answer.bound < answer.cost and 0.01 < answer.gap < 1
