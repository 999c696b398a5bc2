"""Lanes of a step: one for each class of equal ranks; lanes of unlike devices side by side."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from passes.hardware.device import Device
from passes.simulation.event_simulator import COMMUNICATION, StreamTask, TaskSpans, simulate_tasks
from passes.simulation.rank_program import OPTIMIZER
from passes.simulation.step_graph import StepGraph
from passes.simulation.step_lowering import lower_step
from passes.simulation.step_timeline import LiveInterval, TaskLabel, memory_over_time

CONTENTION = {"cpu": 2.0, "cuda": 1.19}
"""Slowdown of both streams while both run, by kind of device. cpu: gloo moves and adds the bytes on the cores that
compute, so overlap gains nothing. cuda: computation that overlaps communication was 18.9% slower on average (up to 40%)
over GPT and LLaMA models on A100, H100, MI210 and MI250 ("Characterizing compute-communication overlap in
GPU-accelerated distributed deep learning", 2025, arXiv 2507.03114)."""


@dataclass(frozen=True)
class RankLanes:
    """Tasks, with the label and the kernel kind of each ("" for communication); for each lane, its ranks and their device
    (None: unknown); and joules on links. intervals, held: for each lane of a pipeline, the live intervals of bytes, and the
    bytes in memory all the time by part. above_idle_j: joules of all ranks and links besides those of idle devices, where
    these do not follow from kernels and link_j."""

    tasks: list[StreamTask]
    labels: list[TaskLabel]
    intervals: list[list[LiveInterval]]
    held: list[Mapping[str, float]]
    ranks: list[tuple[int, ...]]
    devices: list[Device | None]
    kernels: list[str]
    link_j: float
    above_idle_j: float | None = None

    @staticmethod
    def idle(ranks: int, device: Device | None) -> RankLanes:
        """One lane whose ranks are idle."""
        return RankLanes([], [], [[]], [{}], [tuple(range(ranks))], [device], [], 0.0)

    def run(self, contention: float | None = None) -> TaskSpans:
        """Simulate the tasks. contention: None takes the default of each lane's device."""
        return simulate_tasks(self.tasks, [contention if contention is not None else CONTENTION[device.kind if device
                                                                                                else "cpu"]
                                           for device in self.devices])

    def memory(self, spans: TaskSpans) -> list[tuple[tuple[float, int], ...]]:
        """(µs, bytes in memory from then on) of a rank of each lane."""
        return [memory_over_time(intervals, spans, sum(held.values()))
                for intervals, held in zip(self.intervals, self.held)]

    def parts(self, spans: TaskSpans, lane: int) -> dict[str, tuple[tuple[float, int], ...]]:
        """The same for one lane, by part."""
        by_part: dict[str, list[LiveInterval]] = {part: [] for part in self.held[lane]}
        for each in self.intervals[lane]:
            by_part.setdefault(each.part, []).append(each)
        return {part: memory_over_time(intervals, spans, self.held[lane].get(part, 0.0))
                for part, intervals in by_part.items()}


def one_lane(graphs: Sequence[StepGraph], *, ranks: int = 1, device: Device | None = None, microbatches: int = 1,
             recompute: bool = False, overlap: bool = True) -> RankLanes:
    """The lane of `ranks` equal devices that run these graphs, one after the other, in every step; see `lower_step`."""
    made = lower_step(graphs, microbatches, recompute)
    entries = made.entries
    return RankLanes(made.tasks(overlap), [TaskLabel(e.name, e.kind, e.is_work) for e in entries], [[]], [{}],
                     [tuple(range(ranks))], [device], [e.kernel for e in entries], sum(e.link_j for e in entries) * ranks)


def side_by_side(parts: Sequence[RankLanes], summing: Sequence[int], sum_us: float, sum_j: float) -> RankLanes:
    """One lane from each part, with consecutive ranks, which meet where gradients are summed: in a task of `sum_us` on the
    lanes `summing`, before their optimizers run; its links take `sum_j`."""
    tasks: list[StreamTask] = []
    steps: list[int] = []  # index of each lane's optimizer task, if any
    ranks: list[tuple[int, ...]] = []
    for lane, part in enumerate(parts):
        offset, first = len(tasks), sum(map(len, ranks))
        ranks.append(tuple(range(first, first + len(part.ranks[0]))))
        tasks += [replace(task, lanes=(lane,), after=tuple(i + offset for i in task.after)) for task in part.tasks]
        steps += [offset + i for i, label in enumerate(part.labels) if label.kind == OPTIMIZER]
    labels, kernels = [x for part in parts for x in part.labels], [x for part in parts for x in part.kernels]
    if len(summing) > 1:
        before = sorted({i for step in steps for i in tasks[step].after})
        for step in steps:
            tasks[step] = replace(tasks[step], after=(*tasks[step].after, len(tasks)))
        tasks.append(StreamTask(sum_us, COMMUNICATION, tuple(before), tuple(summing), priority=len(tasks)))
        labels.append(TaskLabel("gradients of all groups", "all_reduce", False))
        kernels.append("")
    return RankLanes(tasks, labels, [[] for _ in parts], [{} for _ in parts], ranks, [part.devices[0] for part in parts],
                     kernels, sum_j + sum(part.link_j for part in parts))

