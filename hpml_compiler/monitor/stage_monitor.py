"""Measured times of pipeline stages on all ranks, compared with the times by which the graph was split into stages.

Every rank measures a few training steps, then the ranks exchange their times once. Waiting for messages is no work: the
measured bubble is the time that a rank waits in its loop, plus its idle time there before its first and after its last action.
"""
from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.monitor.report import SHORT_US, TOLERANCE, PredictedFigure, Report
from hpml_compiler.monitor.stage_events import Actions, actions_of, joined
from hpml_compiler.runtime.process.device_clock import Clock
from hpml_compiler.runtime.program.stage_timer import LoopTimes, recording
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes import compat
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.pipeline_timeline import TimedStage, simulate_pipeline
from passes.pipeline.stage_assignment import StageAssignment
from passes.simulation.step_timeline import TimelineEvent

log = logging.getLogger("hpml")

WARM_UP = 2
STEPS = 5
"""Measured steps after the warm-up."""
STAGES_ARE_MEASURED = WARM_UP + STEPS + 1
"""Number of the graph call at which all ranks have the report."""


@dataclass(frozen=True)
class StageFigures:
    """Times of one stage, in µs for one microbatch, on its slowest rank if several share it. rank: coordinate on `pp`."""

    stage: int
    rank: int
    forward: PredictedFigure
    backward: PredictedFigure

    @property
    def work(self) -> PredictedFigure:
        return PredictedFigure(f"stage {self.stage}", self.forward.predicted + self.backward.predicted,
                               self.forward.measured + self.backward.measured)


@dataclass(frozen=True)
class StagesReport:
    """Measured and predicted times of a pipeline, as medians over the measured steps. loop: µs from a step's first action to
    the arrival of its last message, on the slowest rank. bubble: average share of it in which a rank is idle. sent_bytes: sent
    by all ranks in a step. `predicted` figures are the times by which the graph was split, and the simulation of their
    schedule; the plan's own times are at measured prices and include sends."""

    graph: str
    steps_measured: int
    stages: tuple[StageFigures, ...]
    loop: PredictedFigure
    bubble: PredictedFigure
    sent_bytes: int
    timeline: tuple[TimelineEvent, ...] = ()
    """Computations of all ranks in the last measured step; lane d is rank d."""

    def text(self) -> str:
        """The report as one line."""
        stages = ", ".join(f"{each.stage} (rank {each.rank}) {format_us(each.forward.measured)} + "
                           f"{format_us(each.backward.measured)}, predicted {format_us(each.forward.predicted)} + "
                           f"{format_us(each.backward.predicted)}" for each in self.stages)
        return (f"{self.graph}: the pipeline takes {format_us(self.loop.measured)} a step, bubble measured "
                f"{self.bubble.measured:.1%}, predicted {self.bubble.predicted:.1%}; "
                f"{format_bytes(self.sent_bytes)} sent; forward + backward of a microbatch by stage: {stages} "
                f"(medians of {self.steps_measured} steps)")

    def warning(self) -> str | None:
        """Warning that a rank has a much larger share of the work than predicted, so that the others wait for it under any
        schedule; None otherwise. Short steps, which are mostly Python overhead, do not count."""
        worst = max(self._shares(), key=lambda each: each.measured / each.predicted if each.predicted else 1.0, default=None)
        if worst is None or self.loop.measured < SHORT_US or worst.measured <= (1 + TOLERANCE) * worst.predicted:
            return None
        return (f"{self.graph}: {worst.name} of the pipeline has {worst.measured:.0%} of the work of all stages, instead of "
                f"the predicted {worst.predicted:.0%}, so the other ranks wait for it. Run `hpml profile` to measure the costs "
                "by which stages are balanced; see docs/monitoring.md")

    def as_report(self) -> Report:
        """The loop as the report of a step, of which it leaves out the optimizer and the script."""
        return Report(step=STAGES_ARE_MEASURED, steps_measured=self.steps_measured,
                      runs=f"the pipeline loop of {self.graph}, without optimizer and script", step_time=self.loop,
                      graphs_us=self.loop.measured, optimizer_us=0.0, between_us=0.0)

    def _shares(self) -> list[PredictedFigure]:
        """Share of each rank in the work of all stages."""
        work: dict[int, list[PredictedFigure]] = {}
        for each in self.stages:
            work.setdefault(each.rank, []).append(each.work)
        predicted = sum(each.work.predicted for each in self.stages)
        measured = sum(each.work.measured for each in self.stages)
        return [PredictedFigure(f"rank {rank}", sum(x.predicted for x in own) / predicted,
                                sum(x.measured for x in own) / measured)
                for rank, own in sorted(work.items()) if predicted and measured]

    def scalars(self) -> dict[str, float]:
        """TensorBoard scalars: ms and shares."""
        found = {"hpml/pipeline/loop_ms/predicted": self.loop.predicted / 1e3,
                 "hpml/pipeline/loop_ms/measured": self.loop.measured / 1e3,
                 "hpml/pipeline/bubble/predicted": self.bubble.predicted, "hpml/pipeline/bubble/measured": self.bubble.measured}
        for each in self.stages:
            for half in (each.forward, each.backward):
                found[f"hpml/pipeline/stage_{each.stage}/{half.name}_ms/predicted"] = half.predicted / 1e3
                found[f"hpml/pipeline/stage_{each.stage}/{half.name}_ms/measured"] = half.measured / 1e3
        return found


@dataclass(frozen=True)
class OwnSteps:
    """Measurements of one rank, sent to the others. place: coordinate on `pp`. work_us: median per microbatch, by stage and
    half ("forward", "backward"). busy_us, loop_us: compute time and duration of the loop, by step. sent_bytes: per step."""

    place: int
    work_us: Mapping[tuple[int, str], float]
    busy_us: Sequence[float]
    loop_us: Sequence[float]
    sent_bytes: int
    last: Actions = ()
    """Computations of the last step."""


@dataclass
class StageMonitor:
    """Wraps the calls of one pipelined training graph. stages: the split into stages, with the predicted µs of one microbatch.
    tell: gathers the measurements of all ranks, in rank order; all ranks call it once, at the same call of the graph. done:
    receives the report."""

    name: str
    table: PipelineSchedule
    place: int
    stages: StageAssignment
    clock: Clock
    tell: Callable[[OwnSteps], list[OwnSteps]]
    done: Callable[[StagesReport], None]
    steps: list[list[LoopTimes]] = field(default_factory=list)
    over: bool = False

    def forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            if self.over:
                return call(*args)
            if len(self.steps) == STAGES_ARE_MEASURED - 1:
                self._end()
                return call(*args)
            self.steps.append([])
            return self._recorded(call, *args)

        return watched

    def backward(self, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def watched(arguments: list[Any]) -> Any:
            return call(arguments) if self.over or not self.steps else self._recorded(call, arguments)

        return compat.mark_boxed(watched)

    def _recorded(self, call: Callable[..., Any], *args: Any) -> Any:
        with recording(self.clock) as loops:
            result = call(*args)
        self.steps[-1] += loops
        return result

    def _end(self) -> None:
        self.over = True
        steps, self.steps = self.steps[WARM_UP:], []
        ranks = self.tell(own_steps(self.place, [step for step in steps if step]))  # without failed steps
        if all(each.loop_us for each in ranks):
            self.done(report_of(self.name, self.table, self.stages, ranks))


def own_steps(place: int, steps: Sequence[Sequence[LoopTimes]]) -> OwnSteps:
    done = [[each for loop in step for each in loop.done()] for step in steps]
    times: dict[tuple[int, str, str], list[float]] = {}
    for each in (each for step in done for each in step):
        times.setdefault((each.action.stage, each.action.kind, "forward" if each.action.kind == "forward" else "backward"),
                         []).append(each.work_us)
    work: dict[tuple[int, str], float] = {}
    for (stage, _, half), found in times.items():  # a split backward counts with both of its parts
        work[stage, half] = work.get((stage, half), 0.0) + statistics.median(found)
    return OwnSteps(place, work, [sum(each.work_us for each in step) for step in done],
                    [sum(loop.took_us for loop in step) for step in steps],
                    int(statistics.median(sum(loop.sent_bytes for loop in step) for step in steps)) if steps else 0,
                    actions_of(steps[-1]) if steps else ())


def report_of(name: str, table: PipelineSchedule, stages: StageAssignment, ranks: Sequence[OwnSteps]) -> StagesReport:
    """Build the report; ranks: measurements of all ranks, in rank order."""
    def measured(stage: int, half: str) -> float:
        return max((each.work_us.get((stage, half), 0.0) for each in ranks if each.place == table.ranks[stage]), default=0.0)

    cut = [TimedStage(forward, whole - forward) for forward, whole in zip(stages.forward_us, stages.time_us, strict=True)]
    played = simulate_pipeline(table, cut)
    loops = [max(each) for each in zip(*(each.loop_us for each in ranks))]
    idle = [1.0 - sum(each.busy_us[k] for each in ranks) / (len(ranks) * took) if took else 0.0 for k, took in enumerate(loops)]
    return StagesReport(
        name, len(loops),
        tuple(StageFigures(k, table.ranks[k], PredictedFigure("forward", stage.forward_us, measured(k, "forward")),
                           PredictedFigure("backward", stage.backward_us, measured(k, "backward"))) for k,
              stage in enumerate(cut)),
        PredictedFigure("loop", played.step_us, statistics.median(loops)),
        PredictedFigure("bubble", played.bubble, statistics.median(idle)),
        sum(each.sent_bytes for each in ranks), tuple(joined([each.last for each in ranks])))


def gathered(own: OwnSteps, group: dist.ProcessGroup) -> list[OwnSteps]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def say(report: StagesReport, folder: str | None, step: int = WARM_UP + STEPS) -> None:
    """Log the report and write its scalars, on rank 0. If they cannot be written, as on a full disk, the run continues."""
    log.info("%s", report.text())
    if (text := report.warning()) is not None:
        log.warning("%s", text)
    if folder is None:
        return
    try:
        writer = tensorboard_scalars.open_writer(folder)
        tensorboard_scalars.write_scalars(writer, report.scalars(), step)
        writer.close()
    except Exception:
        log.exception("the scalars of the pipeline's stages were not written to %s", folder)
