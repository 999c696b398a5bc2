"""Monitor of one process: it measures some steps, profiles one and compares them with the plans' predictions."""
from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hpml_compiler.energy.power_meter import PowerMeter
from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.monitor.measured_window import FEWEST, MeasuredWindow
from hpml_compiler.monitor.prediction import GraphCost, GraphRuns, PredictedStep, expected, graph_cost, peak_bytes_alone
from hpml_compiler.monitor.profile_trigger import ProfileTrigger
from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.monitor.report import PredictedFigure, Report, compared
from hpml_compiler.monitor.step_recorder import RecordedStep, StepRecorder, StepTimes
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.optimizer.resident_memory import OldGradients, held_bytes, trained_parameters
from hpml_compiler.runtime.process.device_clock import Clock, clock_for

log = logging.getLogger("hpml")

LONGEST_WAIT = 10
"""Most steps that a report is delayed until one of them is profiled."""


class PlanMonitor:
    """Compares the measured steps of a run with the predictions of its graphs' plans. Only a monitor that `speaks` (rank 0's)
    logs, and writes TensorBoard scalars into `folder`, if given. `complete`: adds the predicted peak to a graph's plan;
    `peak_bytes`: of a step of several graphs. These are called for a report, so that the first step does not wait for them.

    The monitor does not communicate, and only a report synchronizes with the device. After an error in the monitor, which is
    logged once, monitoring stops and the run continues.
    """

    def __init__(self, device_type: str, *, speaks: bool = True, folder: str | None = None, clock: Clock | None = None,
                 window: MeasuredWindow | None = None, make_profile: Callable[[], StepProfile] | None = None,
                 power: PowerMeter | None = None, rival_us: Callable[[], float | None] = lambda: None,
                 complete: Callable[[GraphPlan], GraphPlan] = lambda plan: plan,
                 peak_bytes: Callable[[Sequence[GraphPlan]], int] = peak_bytes_alone) -> None:
        self.device_type, self.speaks, self.folder = device_type, speaks, folder
        self.clock = clock or clock_for(device_type)
        self.recorder = StepRecorder(self.clock, self._step_ended)
        self.window = window or MeasuredWindow()
        self.profiling = ProfileTrigger(make_profile or self._start_profile)
        self.power, self.rival_us = power or PowerMeter(None), rival_us
        self.complete, self.peak_bytes = complete, peak_bytes
        self.plans: list[GraphPlan] = []
        self.costs: list[GraphCost] = []
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.inputs: dict[int, list[torch.Tensor]] = {}
        """Parameters by graph, during the one step at whose end their bytes are counted. (Longer-lived weak references would
        not do: `model.to(...)` cannot swap a placed parameter that has one.)"""
        self.resident_bytes: dict[str, int] | None = None
        self.report: Report | None = None
        self.active = True
        """True while graph calls and optimizer steps are recorded: not between windows, and not after an error."""
        self.stopped = False
        self._steps_to_wait = 0
        self._count_resident = self._disturbs_next = False
        self._waited, self._writer = 0, None
        self._warned: set[str] = set()

    # -- events of the run ---------------------------------------------------------------------------------------------

    def add_graph(self, plan: GraphPlan) -> int:
        """Register a compiled graph; returns its number. The step in which this happens is not counted."""
        self.plans.append(plan)
        self.costs.append(graph_cost(plan))
        return len(self.plans) - 1

    def disturbed(self) -> None:
        """Exclude the current step: something was compiled in it."""
        if self.active:
            self._do(self._disturb)

    def graph_begins(self, graph: int, backward: bool, arguments: Iterable[Any] = ()) -> Any:
        """Record the start of a compiled graph's call; returns a token for `graph_ends`."""
        return self._do(self._graph_begins, graph, backward, arguments) if self.active else None

    def graph_ends(self, token: Any) -> None:
        if token is not None and self.active:
            self._do(self._graph_ends, token)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self.active:
            self._do(self._optimizer_begins, optimizer)

    def optimizer_ends(self) -> None:
        if self.active:
            self._do(self._optimizer_ends)
        elif self._steps_to_wait:
            self._steps_to_wait -= 1
            if not self._steps_to_wait:
                self.active = True
                self._do(self.recorder.restart)

    def finish(self) -> None:
        """End of the run: report on the steps so far, if there was no report yet."""
        if self.active:
            self._do(self._finish)

    def last_report(self) -> Report | None:
        """The last report; before the first one is due, a report on the steps so far; None if there are too few."""
        if self.report is None and self.window.chosen():
            return self._make_report()
        return self.report

    def _do(self, action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except Exception:
            self.active, self.stopped, self._steps_to_wait = False, True, 0
            log.exception("monitoring stopped because of an error in the monitor; training continues")
            if self.profiling.is_running:
                self.profiling.give_up()
            return None

    # -- handlers of events --------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        self.recorder.disturb()
        self.profiling.give_up()

    def _graph_begins(self, graph: int, backward: bool, arguments: Iterable[Any]) -> Any:
        begun = self.recorder.graph_begins(graph, backward)
        if not self.active:  # the window ended with the previous step
            return None
        if self._count_resident and not backward and graph not in self.inputs:
            self.inputs[graph] = [each for each in arguments if isinstance(each, torch.nn.Parameter)]
        entered = None
        if self.profiling.is_wanted:
            entered = self.profiling.call_begins(self.recorder.step, self._is_first_of_training(graph), backward)
        return begun, entered

    def _is_first_of_training(self, graph: int) -> bool:
        counts = self.recorder.step.counts
        return self.costs[graph].training and sum(sum(c) for g, c in counts.items() if self.costs[g].training) == 1

    def _graph_ends(self, token: tuple[Any, Any]) -> None:
        begun, entered = token
        if entered is not None:
            self.profiling.call_ends(entered)
        self.recorder.graph_ends(begun)

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.add(optimizer)
        self.recorder.optimizer_begins()

    def _optimizer_ends(self) -> None:
        self.recorder.optimizer_ends()
        if self._count_resident:
            self._count_resident, self._disturbs_next = False, True
            self.resident_bytes = held_bytes(self.optimizers, [each for found in self.inputs.values() for each in found])
            self.inputs.clear()
        if self.profiling.is_running:
            self._disturbs_next = True
            held = self.resident_bytes or {}
            self.profiling.optimizer_ended(self.recorder.step, held.get("parameters", 0) + held.get("optimizer", 0))

    def _start_profile(self) -> StepProfile:
        return StepProfile(self.device_type, OldGradients(trained_parameters(self.optimizers)).bytes_left)

    # -- steps and reports ---------------------------------------------------------------------------------------------

    def _step_ended(self, step: RecordedStep) -> None:
        if self.profiling.is_running:
            self.profiling.give_up()
        enough = self.window.add(step)
        samples = self.window.samples
        if len(samples) == 1:
            self.power.begin()
        if samples and self.resident_bytes is None and len(samples) == FEWEST:
            self._count_resident = True
            self.profiling.want(samples[-1])
        if enough and self._may_say(self._make_report()):
            self._steps_to_wait = self.window.close() * step.optimizer_steps
            self.active = False
        elif self._disturbs_next:  # the work after the end of the step took time in this one
            self.recorder.disturb()
        self._disturbs_next = False

    def _may_say(self, report: Report) -> bool:
        """Report now, or delay the report until a step is profiled, if it has to name the class of work that is off. Returns
        True if it reported."""
        self._waited += 1
        if report.step_time.is_off and not report.classes and self.profiling.is_possible and self._waited <= LONGEST_WAIT:
            self.profiling.want(self.window.chosen()[-1])
            return False
        self._waited = 0
        self._say(report)
        return True

    def _finish(self) -> None:
        self.profiling.give_up()
        self.recorder.finish()
        if self.report is None and len(self.window.samples) >= FEWEST:
            self._say(self._make_report())

    def _make_report(self) -> Report:
        steps = self.window.chosen()
        times = _median([step.times(self.clock) for step in steps])
        runs = steps[0].runs
        self.plans = [self.complete(plan) for plan in self.plans]
        prediction = expected(self.plans, self.costs, runs, self.peak_bytes)
        seen = self.profiling.result_for(runs)
        classes = compared(prediction.classes_us, seen.of_step(times)) if seen else ()
        peak_bytes, source = self._peak(seen.peak_bytes if seen else None)
        watts = self.power.watts()
        return Report(
            step=self.window.seen, steps_measured=len(steps), runs=self._named(runs),
            step_time=PredictedFigure("step time", prediction.step_us, times.step_us), graphs_us=times.graphs_us,
            optimizer_us=times.optimizer_us, between_us=times.between_us, classes=classes, memory_source=source,
            peak_memory=None if peak_bytes is None else PredictedFigure("peak memory", prediction.peak_bytes, peak_bytes),
            memory_parts=self._memory_parts(prediction, peak_bytes), energy_j=prediction.energy_j,
            measured_energy_j=None if watts is None else watts * times.step_us * 1e-6, energy_source=self.power.label,
            rival_us=self.rival_us(),
        )

    def _peak(self, profiled: int | None) -> tuple[int | None, str]:
        if profiled is None and self.device_type == "cuda":  # may include the whole model before it was split
            return torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated since the start"
        return profiled, "" if profiled is None else "tensors allocated in one profiled step"

    def _memory_parts(self, prediction: PredictedStep, peak_bytes: int | None) -> tuple[PredictedFigure, ...]:
        if peak_bytes is None or self.resident_bytes is None:
            return ()
        rest = max(peak_bytes - sum(self.resident_bytes.values()), 0)
        return compared(prediction.parts_bytes, {**self.resident_bytes, "activations": rest})

    def _named(self, runs: Iterable[GraphRuns]) -> str:
        return ", ".join(f"{self.costs[run.graph].name} ({run.forward} forward, {run.backward} backward)" for run in runs)

    def _say(self, report: Report) -> None:
        self.report = report
        if not self.speaks:
            return
        if self.folder is not None:
            self._writer = self._writer or tensorboard_scalars.open_writer(self.folder)
            tensorboard_scalars.write(self._writer, report)
        log.info("%s", report.text())
        for kind, text in (("time", report.time_warning()), ("memory", report.memory_warning())):
            if text is not None and kind not in self._warned:
                self._warned.add(kind)
                log.warning("%s", text)


def _median(times: list[StepTimes]) -> StepTimes:
    """Median of each part of the step, separately."""
    return StepTimes(*(statistics.median(getattr(each, name) for each in times)
                       for name in ("step_us", "graphs_us", "optimizer_us")))
