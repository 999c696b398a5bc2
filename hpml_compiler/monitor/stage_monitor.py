"""What the stages of a pipeline take, on all ranks, beside the times that the graph was cut by.

A few training steps are measured on every rank, then all of them tell each other once. Waiting for messages is no work: what a
rank waited in its loop, and what it idled before its first and after its last action there, is the measured bubble.
"""
from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.monitor.report import SHORT_US, TOLERANCE, PredictedFigure
from hpml_compiler.runtime.process.device_clock import Clock
from hpml_compiler.runtime.program.stage_timer import LoopTimes, recording
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.pipeline_timeline import TimedStage, simulate_pipeline
from passes.pipeline.stage_assignment import StageAssignment

log = logging.getLogger("hpml")

WARM_UP = 2
STEPS = 5
"""Steps that are measured after the warm-up."""
STAGES_ARE_MEASURED = WARM_UP + STEPS + 1
"""The call of a graph at which all ranks know the report."""


@dataclass(frozen=True)
class StageFigures:
    """One stage, in µs for one microbatch, of its slowest rank where several share it. rank: along `pp`."""

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
    """Medians over the measured steps. loop: µs from a step's first action to the arrival of its last message, of the slowest
    rank. bubble: the share of it in which a rank has nothing to do, on average. sent_bytes: by all ranks in a step. What is
    `predicted` are the times that the graph was cut by, and their schedule as it is simulated; a plan has times at measured
    prices, and with what is sent."""

    graph: str
    steps_measured: int
    stages: tuple[StageFigures, ...]
    loop: PredictedFigure
    bubble: PredictedFigure
    sent_bytes: int

    def text(self) -> str:
        """One line."""
        stages = ", ".join(f"{each.stage} (rank {each.rank}) {format_us(each.forward.measured)} + "
                           f"{format_us(each.backward.measured)}, cut by {format_us(each.forward.predicted)} + "
                           f"{format_us(each.backward.predicted)}" for each in self.stages)
        return (f"{self.graph}: its loop takes {format_us(self.loop.measured)} a step, with a bubble of "
                f"{self.bubble.measured:.1%}, and {self.bubble.predicted:.1%} if all went as it was cut; "
                f"{format_bytes(self.sent_bytes)} sent; forward + backward of a microbatch by stage: {stages} "
                f"(medians of {self.steps_measured} steps)")

    def warning(self) -> str | None:
        """Where a rank has much more of the work than the cut gave it: the others wait for that rank, whatever the schedule.
        Steps that are mostly Python's calls say nothing of this."""
        worst = max(self._shares(), key=lambda each: each.measured / each.predicted if each.predicted else 1.0, default=None)
        if worst is None or self.loop.measured < SHORT_US or worst.measured <= (1 + TOLERANCE) * worst.predicted:
            return None
        return (f"{self.graph}: {worst.name} of the pipeline has {worst.measured:.0%} of the stages' work, and was given "
                f"{worst.predicted:.0%} by prediction, so the other ranks wait for it. `hpml profile` measures prices here, "
                "which the cut goes by; see docs/monitoring.md")

    def _shares(self) -> list[PredictedFigure]:
        """Of each rank, in the work of all."""
        work: dict[int, list[PredictedFigure]] = {}
        for each in self.stages:
            work.setdefault(each.rank, []).append(each.work)
        predicted = sum(each.work.predicted for each in self.stages)
        measured = sum(each.work.measured for each in self.stages)
        return [PredictedFigure(f"rank {rank}", sum(x.predicted for x in own) / predicted,
                                sum(x.measured for x in own) / measured)
                for rank, own in sorted(work.items()) if predicted and measured]

    def scalars(self) -> dict[str, float]:
        """TensorBoard's: ms and shares."""
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
    """What a rank tells the others. place: along `pp`. work_us: by stage and half ("forward", "backward"), of one microbatch,
    a median. busy_us, loop_us: by step; what it computed, and its loop as a whole."""

    place: int
    work_us: Mapping[tuple[int, str], float]
    busy_us: Sequence[float]
    loop_us: Sequence[float]
    sent_bytes: int


@dataclass
class StageMonitor:
    """Around the calls of one graph that trains through stages. stages: what it was cut by, in µs of one microbatch. tell:
    gives all ranks what each has, in the order of ranks, and is called once, by all of them at the same call."""

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

        watched._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
        return watched

    def _recorded(self, call: Callable[..., Any], *args: Any) -> Any:
        with recording(self.clock) as loops:
            result = call(*args)
        self.steps[-1] += loops
        return result

    def _end(self) -> None:
        self.over = True
        steps, self.steps = self.steps[WARM_UP:], []
        ranks = self.tell(own_steps(self.place, [step for step in steps if step]))  # without those that failed
        if all(each.loop_us for each in ranks):
            self.done(report_of(self.name, self.table, self.stages, ranks))


def own_steps(place: int, steps: Sequence[Sequence[LoopTimes]]) -> OwnSteps:
    done = [[each for loop in step for each in loop.done()] for step in steps]
    times: dict[tuple[int, str, str], list[float]] = {}
    for each in (each for step in done for each in step):
        times.setdefault((each.action.stage, each.action.kind, "forward" if each.action.kind == "forward" else "backward"),
                         []).append(each.work_us)
    work: dict[tuple[int, str], float] = {}
    for (stage, _, half), found in times.items():  # a backward that is cut in two is both of its parts
        work[stage, half] = work.get((stage, half), 0.0) + statistics.median(found)
    return OwnSteps(place, work, [sum(each.work_us for each in step) for step in done],
                    [sum(loop.took_us for loop in step) for step in steps],
                    int(statistics.median(sum(loop.sent_bytes for loop in step) for step in steps)) if steps else 0)


def report_of(name: str, table: PipelineSchedule, stages: StageAssignment, ranks: Sequence[OwnSteps]) -> StagesReport:
    """ranks: of all, in the order of ranks."""
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
        sum(each.sent_bytes for each in ranks))


def gathered(own: OwnSteps, group: dist.ProcessGroup) -> list[OwnSteps]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def say(report: StagesReport, folder: str | None, step: int = WARM_UP + STEPS) -> None:
    """Rank 0's. The run goes on where scalars cannot be written, as on a full disk."""
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
