"""Steps as they end -> which are measured, and when there are enough."""
from __future__ import annotations

from hpml_compiler.monitor.measured_window import MeasuredWindow
from hpml_compiler.monitor.step_recorder import RecordedStep


def training(graph=0, disturbed=False):
    return RecordedStep(start=0, end=1, counts={graph: [1, 1]}, spans=[(0, 1)] * 2, optimizer_steps=1, disturbed=disturbed)


def test_reports_come_after_a_warm_up_and_then_ever_more_rarely():
    window, due = MeasuredWindow(warm_up=5, wanted=10), []
    number = 0
    while number < 1000:
        number += 1
        if window.add(training()):
            due.append(number)
            assert window.seen == number
            number += window.close()
    assert due == [15, 40, 90, 190, 390, 790], "after as many steps as there were until then, ten are measured"


def test_the_warm_up_is_left_out():
    window = MeasuredWindow(warm_up=5, wanted=10)
    steps = [training() for _ in range(15)]
    assert [window.add(step) for step in steps] == [False] * 14 + [True]
    assert window.chosen() == steps[5:]


def test_of_a_short_run_a_third_is_warm_up():
    window = MeasuredWindow()
    for _ in range(6):
        window.add(training())
    assert len(window.chosen()) == 4


def test_disturbed_steps_are_waited_out():
    window = MeasuredWindow(warm_up=0, wanted=2)
    assert [window.add(training(disturbed=d)) for d in (True, False, True, False)] == [False, False, False, True]


def test_of_several_kinds_the_most_frequent_is_reported():
    window = MeasuredWindow(warm_up=0, wanted=4)
    added = [window.add(training(graph)) for graph in (0, 1, 1, 0, 1, 1)]
    assert added[-1] and not any(added[:-1])
    assert all(1 in step.counts for step in window.chosen())


def test_many_kinds_do_not_wait_for_ever():
    window = MeasuredWindow(warm_up=0, wanted=5)
    assert next(n for n in range(1, 100) if window.add(training(graph=n))) == 20
