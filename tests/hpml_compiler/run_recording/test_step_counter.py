"""Optimizer steps and graph calls at given times -> steps, windows and stalls."""
from __future__ import annotations

import pytest

from hpml_compiler.run_recording.step_counter import StepCounter


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(counter, time, took, optimizers=(1,), calls=1, graphs=True):
    for _ in range(calls):
        if graphs:
            counter.graph_called(8, 64, 1e6)
    time.now += took
    for optimizer in optimizers:
        counter.optimizer_ended(optimizer)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("optimizers", [(1,), (1, 2)])
def test_optimizers_after_each_other_end_one_step(graphs, optimizers):
    time = Time()
    counter = StepCounter(100, time)
    for took in (9.0, 1.0, 2.0):
        run(counter, time, took, optimizers, calls=3, graphs=graphs)
    counter.finish()
    counter.finish()
    window = counter.take()
    assert counter.step == 103 and (window.steps, window.seconds, window.longest_s) == (2, 3.0, 2.0)  # the first has no start
    assert (window.samples, window.tokens, window.flops) == ((48, 384, 6e6) if graphs else (0, 0, 0))
    assert counter.take().steps == 0


def test_a_script_may_count_by_itself():
    time = Time()
    counter = StepCounter(clock=time)
    for _ in range(2):
        run(counter, time, 1.0)
        counter.count(5, None)
    counter.finish()
    window = counter.take()
    assert (window.samples, window.tokens) == (5, 64)


@pytest.mark.parametrize(("usual", "long", "disturbed", "stalls"), [
    (0.1, 0.7, False, True), (0.1, 0.55, False, False), (1.0, 4.0, False, False), (1.0, 6.0, False, True),
    (0.1, 9.0, True, False)])
def test_stalls(usual, long, disturbed, stalls):
    time = Time()
    counter = StepCounter(clock=time)
    for _ in range(8):
        run(counter, time, usual)
    counter.graph_called(0, 0, 0)
    assert counter.stalled is None
    if disturbed:
        counter.disturb()
    run(counter, time, long)
    run(counter, time, usual)  # its call ends the long step
    found = counter.stalled
    assert (found is not None) == stalls
    if found is not None:
        assert found.step == 10 - 1 and found.seconds == pytest.approx(long) and found.usual_s == pytest.approx(usual)
