"""A counter of joules and a clock -> watts; and a run's report with its energy beside the plan's estimate."""
from __future__ import annotations

import pytest
import torch

from hpml_compiler.energy.power_meter import PowerMeter
from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.monitor.measured_window import MeasuredWindow
from hpml_compiler.monitor.monitor import PlanMonitor
from tests.helpers.plans import gpt_graph
from tests.hpml_compiler.monitor.fakes import FakeClock, FakeProfile, Script


class FakeCounter:
    label = "measured (RAPL)"

    def __init__(self) -> None:
        self.total, self.fails = 0.0, False

    def joules(self) -> float:
        if self.fails:
            raise OSError("gone")
        return self.total


def test_power_is_what_was_counted_by_the_time_since_the_beginning():
    counter, clock = FakeCounter(), iter([10.0, 12.0])
    meter = PowerMeter(counter, clock=lambda: next(clock))
    meter.begin()
    counter.total = 50.0
    assert meter.watts() == 25.0 and meter.label == "measured (RAPL)"


def test_a_part_of_the_devices_stands_for_all():
    counter, clock = FakeCounter(), iter([0.0, 1.0])
    meter = PowerMeter(counter, share=0.25, clock=lambda: next(clock))
    meter.begin()
    counter.total = 10.0
    assert meter.watts() == 40.0 and meter.label == "measured (RAPL) on 25% of the devices"


def test_without_a_meter_or_when_it_fails_nothing_is_measured(caplog):
    meter = PowerMeter(None)
    meter.begin()
    assert meter.watts() is None and meter.label == ""
    counter = FakeCounter()
    meter = PowerMeter(counter)
    assert meter.watts() is None, "it did not begin"
    meter.begin()
    counter.fails = True
    assert meter.watts() is None and meter.label == "" and "stopped answering" in caplog.text


def test_on_this_machine_there_is_a_meter_or_not():
    meter = PowerMeter.here("cpu")
    assert (meter.label != "") == (meter.counter is not None) and meter.share == 1.0


@pytest.mark.parametrize("metered", [True, False])
def test_a_run_reports_joules_of_a_step(metered):
    """1 W all the time: as many µJ as µs."""
    clock, counter = FakeClock(), FakeCounter()
    power = PowerMeter(counter if metered else None, clock=lambda: clock.now * 1e-6)
    monitor = PlanMonitor("cpu", clock=clock, window=MeasuredWindow(warm_up=1, wanted=4), make_profile=FakeProfile, power=power)
    plan = gpt_graph()
    monitor.add_graph(plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"energy_j": 0.5})}))
    weight = torch.nn.Parameter(torch.ones(1))
    script = Script(monitor, clock, torch.optim.SGD([weight]))
    for _ in range(12):
        script.step()
        counter.total = clock.now * 1e-6
    report = monitor.last_report()
    assert report is not None and report.energy_j == pytest.approx(0.5)
    assert "predicted 0.5 J (estimated)" in report.text()
    if metered:
        assert report.measured_energy_j == pytest.approx(37e-6, rel=0.2)
        assert "measured (RAPL) 3" in report.text()
    else:
        assert report.measured_energy_j is None and "measured (" not in report.text()
    assert ("hpml/energy_J/measured" in tensorboard_scalars.scalars(report)) == metered
