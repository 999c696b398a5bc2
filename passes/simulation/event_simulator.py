"""Discrete-event simulation on numbers alone: tasks that occupy streams, take time and wait for one another.

Every lane has two streams, COMPUTE and COMMUNICATION; a stream runs one task at a time: the ready one with the
lowest priority number. A task may occupy the same stream of several lanes (a collective between lanes): it starts
when all of them are free, and occupies none before.

Contention is a fluid model: while both streams of a lane are busy, tasks on them advance at 1 / c of full speed.
c = 1: overlap is free. c = 2: overlap gains nothing, since two tasks then take as long as one after the other. A task on
several lanes advances at the speed of its slowest.

Nothing here knows of models, plans or devices.
"""
from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE, COMMUNICATION = 0, 1


@dataclass(frozen=True, slots=True)
class StreamTask:
    """Work of `us` >= 0 microseconds (when nothing else runs) on `stream` of `lanes`, after the tasks of those indices."""

    us: float
    stream: int = COMPUTE
    after: tuple[int, ...] = ()
    lanes: tuple[int, ...] = (0,)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TaskSpans:
    """Start and end of each task, in µs; by index."""

    start_us: list[float]
    stop_us: list[float]

    @property
    def end_us(self) -> float:
        """End of the last task; 0 without tasks."""
        return max(self.stop_us, default=0.0)


def simulate_tasks(tasks: Sequence[StreamTask], contention: Sequence[float] = (1.0,)) -> TaskSpans:
    """Spans of all tasks. contention: c of each lane, from 1 to 2.

    Raises ValueError for a negative or infinite time, an unknown lane or task, a contention out of range, or tasks that
    wait for each other.
    """
    return _EventLoop(tasks, contention).run()


def least_overlapped_us(sum_us: float, compute_us: float, contention: float) -> float:
    """Tasks on one lane that take sum_us together, at least compute_us of it on its compute stream, take no less."""
    return compute_us + (contention - 1.0) * max(sum_us - compute_us, 0.0)


class _EventLoop:
    def __init__(self, tasks: Sequence[StreamTask], contention: Sequence[float]):
        _check(tasks, contention)
        count = len(tasks)
        self.tasks, self.contention = tasks, contention
        self.start, self.stop = [math.nan] * count, [math.nan] * count
        self.left = [task.us for task in tasks]  # work, in µs at full speed
        self.speed = [0.0] * count
        self.seen = [0.0] * count  # time of the last update of `left`
        self.version = [0] * count
        self.missing = [len(set(task.after)) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for before in set(task.after):
                self.followers[before].append(index)
        self.running: list[list[int | None]] = [[None, None] for _ in contention]
        self.ready: list[tuple[list, list]] = [([], []) for _ in contention]
        self.finishing: list[tuple[float, int, int]] = []
        self.now = 0.0

    def run(self) -> TaskSpans:
        touched = {lane for lane in range(len(self.contention))}
        for index, missing in enumerate(self.missing):
            if not missing:
                self._enqueue(index)
        self._start(touched)
        done = 0
        while self.finishing:
            self.now = self.finishing[0][0]
            touched = set()
            while self.finishing and self.finishing[0][0] == self.now:
                _, index, version = heapq.heappop(self.finishing)
                if version == self.version[index]:
                    done += 1
                    self._finish(index, touched)
            self._start(touched)
        if done < len(self.tasks):
            stuck = next(i for i, stop in enumerate(self.stop) if math.isnan(stop))
            raise ValueError(f"task {stuck} waits for a task that waits for it")
        return TaskSpans(self.start, self.stop)

    def _enqueue(self, index: int) -> None:
        task = self.tasks[index]
        for lane in task.lanes:
            heapq.heappush(self.ready[lane][task.stream], (task.priority, index))

    def _finish(self, index: int, touched: set[int]) -> None:
        task = self.tasks[index]
        self.stop[index] = self.now
        self.version[index] += 1
        for lane in task.lanes:
            self.running[lane][task.stream] = None
            touched.add(lane)
        for follower in self.followers[index]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self._enqueue(follower)
                touched.update(self.tasks[follower].lanes)

    def _start(self, touched: set[int]) -> None:
        """Start all tasks that can start, then update the speeds of the tasks on these lanes."""
        changed = set(touched)
        for lane in sorted(touched):
            for stream in (COMPUTE, COMMUNICATION):
                changed.update(self._start_one(lane, stream))
        for index in {i for lane in changed for i in self.running[lane] if i is not None}:
            self._set_speed(index)

    def _start_one(self, lane: int, stream: int) -> tuple[int, ...]:
        """Start the first ready task of this stream whose lanes are all free; returns the lanes it occupies."""
        if self.running[lane][stream] is not None:
            return ()
        heap, waiting, lanes = self.ready[lane][stream], [], ()
        while heap:
            entry = heapq.heappop(heap)
            index = entry[1]
            if not math.isnan(self.start[index]):
                continue  # already started from another of its lanes
            if any(self.running[each][stream] is not None for each in self.tasks[index].lanes):
                waiting.append(entry)
                continue
            self.start[index] = self.seen[index] = self.now
            lanes = self.tasks[index].lanes
            for each in lanes:
                self.running[each][stream] = index
            break
        for entry in waiting:
            heapq.heappush(heap, entry)
        return lanes

    def _set_speed(self, index: int) -> None:
        task = self.tasks[index]
        other = 1 - task.stream
        speed = min((1.0 / self.contention[lane] if self.running[lane][other] is not None else 1.0 for lane in task.lanes),
                    default=1.0)
        if speed == self.speed[index]:
            return
        self.left[index] = max(0.0, self.left[index] - (self.now - self.seen[index]) * self.speed[index])
        self.seen[index], self.speed[index] = self.now, speed
        self.version[index] += 1
        heapq.heappush(self.finishing, (self.now + self.left[index] / speed, index, self.version[index]))


def _check(tasks: Sequence[StreamTask], contention: Sequence[float]) -> None:
    for lane, factor in enumerate(contention):
        if not 1.0 <= factor <= 2.0:
            raise ValueError(f"contention must be from 1 (overlap is free) to 2 (no gain), got {factor} on lane {lane}")
    for index, task in enumerate(tasks):
        if not 0.0 <= task.us < math.inf:
            raise ValueError(f"task {index} takes {task.us} us; it must be 0 or more, and finite")
        if task.stream not in (COMPUTE, COMMUNICATION):
            raise ValueError(f"task {index} is on stream {task.stream}; there are {COMPUTE} and {COMMUNICATION}")
        if not task.lanes or len(set(task.lanes)) < len(task.lanes):
            raise ValueError(f"task {index} names no lane, or one twice: {task.lanes}")
        if not all(0 <= lane < len(contention) for lane in task.lanes):
            raise ValueError(f"task {index} is on lanes {task.lanes}; there are {len(contention)}")
        if not all(0 <= before < len(tasks) for before in task.after):
            raise ValueError(f"task {index} waits for tasks that are not there: {task.after}")
