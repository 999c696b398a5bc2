"""Calls and optimizer steps -> steps, and the time of each part."""
from __future__ import annotations

import pytest

from hpml_compiler.monitor.prediction import GraphRuns
from hpml_compiler.monitor.step_recorder import MOST_SPANS, StepRecorder, StepTimes, most_common
from tests.hpml_compiler.monitor.fakes import FakeClock, Script


@pytest.fixture
def run():
    """(script, recorder, steps that have ended)."""
    steps, clock = [], FakeClock()
    recorder = StepRecorder(clock, steps.append)
    return Script(recorder, clock), recorder, steps


def times(step, script):
    return step.times(script.clock)


def test_a_step_reaches_from_one_optimizer_step_to_the_next(run):
    script, recorder, steps = run
    for _ in range(3):
        script.step()
    recorder.finish()
    assert [step.runs for step in steps] == [(GraphRuns(0, 1, 1),)] * 3
    assert [step.counts_as_training for step in steps] == [False, True, True], "the first has no known start"
    assert times(steps[1], script) == StepTimes(step_us=37.0, graphs_us=30.0, optimizer_us=5.0)
    assert times(steps[1], script).between_us == 2.0


def test_gradient_accumulation_is_one_step(run):
    script, _, steps = run
    for times_ in (1, 4, 1, 1):
        script.step(times=times_)
    assert steps[1].runs == (GraphRuns(0, 4, 4),)
    assert times(steps[1], script) == StepTimes(127.0, 120.0, 5.0)
    assert steps[1].signature != steps[2].signature


def test_optimizers_one_after_the_other_end_one_step(run):
    script, _, steps = run
    for _ in range(3):
        script.step()
        script.between(1.0)
        script.optimize(us=7.0)
    assert [step.optimizer_steps for step in steps] == [2, 2]
    assert times(steps[1], script) == StepTimes(45.0, 30.0, 12.0)


def test_two_models_with_an_optimizer_each_make_steps_of_two_kinds(run):
    script, recorder, steps = run
    for _ in range(4):
        script.step(0)
        script.step(1, forward_us=100.0)
        script.step(1, forward_us=100.0)
    recorder.finish()
    assert most_common(steps[1:])[0].runs == (GraphRuns(1, 1, 1),)
    assert {times(step, script).step_us for step in most_common(steps[1:])} == {127.0}


def test_an_evaluation_belongs_to_the_step_after_and_is_told_apart(run):
    script, _, steps = run
    script.step()
    script.step()
    for _ in range(3):
        script.graph(1, us=50.0)
    script.step()
    script.step()
    assert [step.runs for step in steps] == [(GraphRuns(0, 1, 1),)] * 2 + [(GraphRuns(0, 1, 1), GraphRuns(1, 3, 0))]
    assert times(steps[2], script).step_us == 187.0


def test_an_optimizer_with_a_closure_runs_graphs_inside_its_step(run):
    script, recorder, steps = run
    for _ in range(2):
        recorder.optimizer_begins()
        for _ in range(3):
            script.graph()
            script.graph(backward=True)
        script.between(4.0)
        recorder.optimizer_ends()
    script.graph()
    assert steps[1].runs == (GraphRuns(0, 3, 3),)
    assert times(steps[1], script) == StepTimes(64.0, 60.0, 4.0)


def test_a_step_with_a_compilation_does_not_count(run):
    script, recorder, steps = run
    script.step()
    script.step()
    recorder.disturb()  # Dynamo compiles before it calls
    script.step()
    script.step()
    script.graph()
    assert [step.counts_as_training for step in steps] == [False, True, False, True]


def test_a_step_without_backward_does_not_count(run):
    script, recorder, steps = run
    script.step()
    script.graph()
    script.optimize()
    recorder.finish()
    assert not steps[1].counts_as_training


def test_after_a_restart_the_first_step_does_not_count(run):
    script, recorder, steps = run
    script.step()
    script.step()
    recorder.restart()
    script.step()
    script.step()
    recorder.finish()
    assert [step.counts_as_training for step in steps] == [False, False, True]


def test_memory_is_bounded_where_no_optimizer_runs(run):
    script, recorder, steps = run
    for _ in range(MOST_SPANS + 10):
        script.graph()
    assert len(recorder.step.spans) == MOST_SPANS and not steps
    script.graph(backward=True)
    script.optimize()
    recorder.finish()
    assert not steps[0].counts_as_training


def test_a_failed_optimizer_step_joins_two_steps(run):
    script, recorder, steps = run
    script.step()
    script.graph()
    script.graph(backward=True)
    recorder.optimizer_begins()  # and raises
    script.step()
    recorder.finish()
    assert [step.runs for step in steps] == [(GraphRuns(0, 1, 1),), (GraphRuns(0, 2, 2),)]
