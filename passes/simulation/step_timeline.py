"""Report of a simulated step from the tasks of lanes and their spans: events, time breakdown, bytes over time."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from passes.simulation.event_simulator import COMMUNICATION, StreamTask, TaskSpans
from passes.simulation.rank_program import OPTIMIZER

STREAMS = ("compute", "communication")
SHORTEST_US = 2e-3
"""Shorter local steps are not reported as events: there are so many that they would hide the rest of a trace."""


@dataclass(slots=True)
class LiveInterval:
    """Bytes in memory from the start of one task to the end of another (None: of the step). part: what they are."""

    nbytes: float
    first: int | None
    last: int | None
    part: str


@dataclass(frozen=True)
class EmbeddedCommunication:
    """Communication inside a task. communication_us: all of it; exposed_us: its addition to the task's time."""

    communication_us: float = 0.0
    exposed_us: float = 0.0

    def part(self, share: float) -> EmbeddedCommunication:
        return EmbeddedCommunication(self.communication_us * share, self.exposed_us * share)


NOTHING = EmbeddedCommunication()


@dataclass(frozen=True)
class TaskLabel:
    """Label of a task; `work`: the model's arithmetic or the optimizer's. inside: the communication of a task that includes
    some, such as a microbatch's run through a stage of several ranks."""

    name: str
    kind: str
    work: bool
    inside: EmbeddedCommunication = NOTHING


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """A task as it ran. lane: index of a class of equal ranks; stream: "compute" or "communication"; kind:
    "forward", "recompute", "offload", "backward", "optimizer" on the first, the name of the collective on the second."""

    lane: int
    stream: str
    name: str
    kind: str
    start_us: float
    stop_us: float


@dataclass(frozen=True)
class TimeBreakdown:
    """Means over the ranks, in µs. compute_us, optimizer_us, communication_us: durations without contention.
    bubble_us: both streams are idle. exposed_communication_us: the rest, the cost of communication to the step."""

    compute_us: float
    communication_us: float
    exposed_communication_us: float
    bubble_us: float
    optimizer_us: float


def breakdown(tasks: Sequence[StreamTask], labels: Sequence[TaskLabel], spans: TaskSpans,
              ranks: Sequence[int]) -> TimeBreakdown:
    """ranks: how many each lane stands for. Every lane's step is the duration of its work without contention, plus the time
    when neither stream runs, plus the rest, which is attributed to communication."""
    step, lanes = spans.end_us, range(len(ranks))
    compute, optimizer, communication = ([[] for _ in lanes] for _ in range(3))
    busy: list[list[tuple[float, float]]] = [[] for _ in lanes]
    for index, (task, label) in enumerate(zip(tasks, labels)):
        for lane in task.lanes:
            own = communication if not label.work else optimizer if label.kind == OPTIMIZER else compute
            own[lane].append(task.us - label.inside.exposed_us)
            communication[lane].append(label.inside.communication_us)
            busy[lane].append((spans.start_us[index], spans.stop_us[index]))
    total = sum(ranks)
    shares = [count / total for count in ranks]

    def mean(each: Sequence[float]) -> float:
        return math.fsum(share * value for share, value in zip(shares, each))

    compute_us, optimizer_us = mean([math.fsum(each) for each in compute]), mean([math.fsum(each) for each in optimizer])
    bubble_us = mean([idle_us(each, step) for each in busy])
    exposed = step - compute_us - optimizer_us - bubble_us
    return TimeBreakdown(compute_us, mean([math.fsum(each) for each in communication]), max(0.0, exposed), bubble_us,
                         optimizer_us)


def idle_us(spans: Sequence[tuple[float, float]], step_us: float) -> float:
    """Time of [0, step_us] that none of the spans covers."""
    gaps, reached = [], 0.0
    for start, stop in sorted(spans):
        gaps.append(max(0.0, start - reached))
        reached = max(reached, stop)
    return math.fsum([*gaps, max(0.0, step_us - reached)])


def events(tasks: Sequence[StreamTask], labels: Sequence[TaskLabel], spans: TaskSpans) -> tuple[TimelineEvent, ...]:
    """One event per task and lane, by lane, stream and start."""
    found = [
        TimelineEvent(lane, STREAMS[task.stream], label.name, label.kind, spans.start_us[i], spans.stop_us[i])
        for i, (task, label) in enumerate(zip(tasks, labels))
        if task.us > SHORTEST_US or (task.us and task.stream == COMMUNICATION)
        for lane in task.lanes
    ]
    return tuple(sorted(found, key=lambda e: (e.lane, e.stream != STREAMS[0], e.start_us, e.stop_us)))


def memory_over_time(intervals: Sequence[LiveInterval], spans: TaskSpans, constant_bytes: float) -> tuple[tuple[float, int],
                                                                                                          ...]:
    """(µs, bytes in memory from then on) at each change, from 0 to the end of the step. At equal times, frees come before
    allocations, except for values that one entry both reads and makes."""
    changes: dict[float, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in intervals:
        start = 0.0 if each.first is None else spans.start_us[each.first]
        stop = spans.end_us if each.last is None else spans.stop_us[each.last]
        if stop >= start:
            changes[start][1] += each.nbytes
            changes[stop][0] -= each.nbytes
    held, found = constant_bytes, [(0.0, round(constant_bytes))]
    for us in sorted(changes):
        freed, made = changes[us]
        held += freed + made
        if us == found[-1][0]:
            found.pop()
        if not found or round(held) != found[-1][1]:
            found.append((us, round(held)))
    if found[-1][0] < spans.end_us:
        found.append((spans.end_us, round(held)))
    return tuple(found)
