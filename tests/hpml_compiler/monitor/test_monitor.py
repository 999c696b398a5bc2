"""A training loop on a fake clock -> reports, warnings, and nothing that could stop the loop."""
from __future__ import annotations

import logging

import pytest
import torch

from hpml_compiler.monitor.measured_window import MeasuredWindow
from hpml_compiler.monitor.monitor import LONGEST_WAIT, PlanMonitor
from hpml_compiler.monitor.prediction import graph_cost
from passes import compat
from tests.helpers.plans import gpt_graph
from tests.hpml_compiler.monitor.fakes import FakeClock, FakeProfile, Script

PLAN = gpt_graph()  # 166 us, of which 15 in the optimizer
PEAK = PLAN.memory.peak
COST = graph_cost(PLAN)


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.INFO, logger="hpml")
    return caplog


def warnings(said):
    return [record.getMessage() for record in said.records if record.levelno == logging.WARNING]


def loop(profiles=None, device_type="cpu", plans=(PLAN,), **more):
    """(script, monitor); `profiles` are handed out one after the other."""
    clock = FakeClock()
    left = iter([FakeProfile() for _ in range(9)] if profiles is None else profiles)
    monitor = PlanMonitor(device_type, clock=clock, window=MeasuredWindow(warm_up=2, wanted=4), make_profile=lambda: next(left),
                      **{"rival_us": lambda: 0.0, **more})
    for plan in plans:
        monitor.add_graph(plan)
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight])
    monitor.kept = (weight, optimizer)  # type: ignore[attr-defined]
    return Script(monitor, clock, optimizer), monitor


def right(script, times=1):
    """A step that takes exactly what the plan predicts, between and optimizer aside."""
    script.step(times=times, forward_us=100.0, backward_us=166.0 - 100.0 - 2.0 - 5.0)


def test_a_good_prediction_is_reported_and_nobody_is_warned(said):
    script, monitor = loop([FakeProfile(peak_bytes=PEAK)])
    for _ in range(20):
        right(script)
    report = monitor.report
    assert report is not None
    assert (report.step_time.predicted, report.step_time.measured) == (pytest.approx(166.0), pytest.approx(166.0))
    assert (report.graphs_us, report.optimizer_us, report.between_us) == pytest.approx((159.0, 5.0, 2.0))
    assert report.steps_measured == 4 and report.peak_memory is not None and report.peak_memory.ratio == 1.0
    assert [r.levelno for r in said.records] == [logging.INFO] and "ratio 1.00" in said.text


def test_accumulation_is_compared_with_so_many_calls():
    script, monitor = loop()
    for _ in range(12):
        right(script, times=3)
    assert monitor.report is not None and "(3 forward, 3 backward)" in monitor.report.runs
    assert monitor.report.step_time.predicted == pytest.approx(3 * COST.graph_us + 15)
    assert monitor.report.step_time.measured == pytest.approx(3 * 159 + 7)


def test_evaluations_in_between_are_not_what_is_reported():
    evaluation = gpt_graph(layers=1, name="evaluation").model_copy(update={"training": False})
    script, monitor = loop(plans=(PLAN, evaluation))
    for number in range(30):
        if number % 3 == 0:
            for _ in range(5):
                script.graph(1, us=1000.0)
        right(script)
    assert monitor.report is not None and monitor.report.runs == "GPT (1 forward, 1 backward)"
    assert monitor.report.step_time.measured == pytest.approx(166.0)


def test_a_bad_one_warns_once_and_names_the_class(said):
    script, monitor = loop([FakeProfile({"matmul": 10.0, "collective": 90.0}, peak_bytes=PEAK)])
    for _ in range(60):
        script.step(forward_us=1000.0, backward_us=1000.0)
    (warning,) = warnings(said)
    assert "The largest part is collective: predicted 30.0 us, measured 1.80 ms" in warning
    assert len([r for r in said.records if r.levelno == logging.INFO]) >= 3, "reports go on"
    assert monitor.report is not None and sum(c.measured for c in monitor.report.classes) == pytest.approx(2007.0)


def test_too_much_memory_warns_of_the_part(said):
    script, monitor = loop([FakeProfile(peak_bytes=2 * PEAK)])
    for _ in range(20):
        right(script)
    (warning,) = warnings(said)
    assert "the predicted peak memory is off by 50%" in warning and "The largest part is activations" in warning
    assert monitor.resident_bytes == {"parameters": 400, "gradients": 0, "optimizer": 0}


def test_on_a_gpu_a_step_is_profiled_for_its_peak_too(said):
    used = FakeProfile(peak_bytes=PEAK)
    script, monitor = loop([used], device_type="cuda")
    for _ in range(20):
        right(script)
    assert used.log == ["begin", "end", "begin", "end", "stop"]
    assert monitor.report is not None and monitor.report.peak_memory.measured == PEAK and not warnings(said)


def test_on_a_gpu_without_a_profile_the_peak_is_that_since_the_start(said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: PEAK)
    monkeypatch.setattr(compat, "profiler_is_on", lambda: True)
    script, monitor = loop([], device_type="cuda")
    for _ in range(40):
        right(script)
    assert monitor.report is not None and monitor.report.peak_memory.measured == PEAK
    assert "max_memory_allocated" in monitor.report.memory_source


def test_a_profiled_step_and_the_one_after_are_not_measured():
    class Slow(FakeProfile):
        def stop(self, steady_bytes=0):
            script.clock.now += 5000.0
            return super().stop()

        def end_graph(self, entered):
            script.clock.now += 5000.0

    script, monitor = loop([Slow()])
    for _ in range(12):
        right(script)
    assert monitor.report is not None and monitor.report.classes
    assert monitor.report.step_time.measured == pytest.approx(166.0)


def test_an_evaluation_while_profiling_gives_the_profile_up():
    first, second = FakeProfile(), FakeProfile()
    evaluation = gpt_graph(layers=1).model_copy(update={"training": False})
    script, monitor = loop([first, second], plans=(PLAN, evaluation))
    for _ in range(4):
        right(script)
    script.graph(0, us=100.0)
    for _ in range(50):
        script.graph(1)
    script.graph(0, backward=True)
    script.optimize()
    assert first.log[-1] == "cancel" and len(first.log) < 12
    for _ in range(8):
        right(script)
    assert second.log[-1] == "stop"


def test_a_step_in_which_the_script_profiled_something_is_not_it():
    class Taken(FakeProfile):
        def stop(self, steady_bytes=0):
            super().stop()

    taken, used = Taken(), FakeProfile()
    script, monitor = loop([taken, used])
    for _ in range(20):
        right(script)
    assert taken.log[-1] == used.log[-1] == "stop"
    assert monitor.report is not None and monitor.report.classes


def test_nobody_s_own_profile_is_disturbed_and_the_report_comes_without_classes(said, monkeypatch):
    monkeypatch.setattr(compat, "profiler_is_on", lambda: True)
    used = FakeProfile()
    script, monitor = loop([used])
    for _ in range(6 + LONGEST_WAIT + 3):
        script.step(forward_us=1000.0)
    assert not used.log
    assert monitor.report is not None and monitor.report.peak_memory is None
    assert "no step could be profiled" in warnings(said)[0]


def test_a_short_run_is_reported_at_its_end(said):
    script, monitor = loop([FakeProfile(peak_bytes=PEAK)])
    for _ in range(5):
        right(script)
    assert not said.records
    monitor.finish()
    assert monitor.report is not None and monitor.report.steps_measured >= 2
    monitor.finish()
    assert len(said.records) == 1


def test_what_never_trained_is_not_reported(said):
    script, monitor = loop()
    for _ in range(50):
        script.graph(0)
    monitor.finish()
    assert monitor.last_report() is None and not said.records


def test_before_a_report_is_due_one_can_be_asked_for():
    script, monitor = loop()
    for _ in range(4):
        right(script)
    asked = monitor.last_report()
    assert monitor.report is None and asked is not None and asked.step_time.measured == pytest.approx(166.0)


def test_other_ranks_measure_and_say_nothing(said):
    script, monitor = loop(speaks=False)
    for _ in range(20):
        script.step(forward_us=1000.0)
    assert monitor.report is not None and not said.records


def test_between_reports_it_only_counts(monkeypatch):
    script, monitor = loop()
    for _ in range(60):
        right(script)
    assert not monitor.active and monitor.report is not None
    seen = monitor.report.step
    monkeypatch.setattr(monitor.recorder, "clock", None)  # it takes no marks
    while not monitor.active:
        right(script)
    monkeypatch.undo()
    for _ in range(6):
        right(script)
    assert 2 * seen + 4 <= monitor.report.step <= 2 * seen + 6 and not monitor.stopped


@pytest.mark.parametrize("broken", ["clock", "profile", "optimizer"])
def test_an_error_in_the_monitor_is_logged_once_and_the_loop_goes_on(said, broken):
    class Broken(FakeProfile):
        def stop(self, steady_bytes=0):
            raise RuntimeError("no such thing")

    profile = Broken() if broken == "profile" else FakeProfile()
    script, monitor = loop([profile])
    for number in range(30):
        if number == 3 and broken == "clock":
            monitor.recorder.clock = None
        if number == 3 and broken == "optimizer":
            monitor.optimizers = None
        right(script)
    assert monitor.stopped
    (record,) = said.records
    assert record.levelno == logging.ERROR and record.exc_info and "monitoring stopped" in record.getMessage()


def test_an_error_in_the_script_reaches_it_and_the_count_goes_on():
    from hpml_compiler.monitor.hooks import WatchedGraph

    script, monitor = loop()

    def fails(*args):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        WatchedGraph(monitor, PLAN).forward(fails)(1)
    for _ in range(12):
        right(script)
    assert monitor.report is not None and not monitor.stopped


def test_reports_go_to_tensorboard_by_the_rank_that_speaks(monkeypatch):
    from hpml_compiler.monitor import tensorboard_scalars

    written = []
    monkeypatch.setattr(tensorboard_scalars, "open_writer", lambda folder: folder)
    monkeypatch.setattr(tensorboard_scalars, "write", lambda writer, report: written.append((writer, report.step)))
    for speaks in (True, False):
        script, _ = loop(speaks=speaks, folder="logs")
        for _ in range(40):
            right(script)
    assert len(written) >= 2 and {folder for folder, _ in written} == {"logs"}
