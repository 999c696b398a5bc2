"""Timer of this rank's pipeline actions: `with recording(clock) as steps:` around training steps.

Without `recording`, nothing is recorded. Each rank has its own record, in time since its loop began, since the clocks of
several machines share no origin.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpml_compiler.runtime.process.device_clock import Clock
from passes.pipeline.pipeline_schedule import ScheduleAction
from passes.session_state import state_of


@dataclass(frozen=True)
class TimedAction:
    """Time of one action, in µs since its rank's loop began. waited_us: time spent waiting for another rank's send."""

    action: ScheduleAction
    start_us: float
    end_us: float
    waited_us: float

    @property
    def work_us(self) -> float:
        return self.end_us - self.start_us - self.waited_us


@dataclass
class LoopTimes:
    """Times of one pass through a rank's part of a schedule, or through its forward or backward half. sent_bytes: sent by this
    rank to others, in the loop and, for its results, after it."""

    clock: Clock
    sent_bytes: int = 0
    _done: list[tuple[ScheduleAction, Any, Any, list[tuple[Any, Any]]]] = field(default_factory=list)
    _waits: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = self._end = self.clock.mark()

    def end(self) -> None:
        """Call this when all sends of this rank have completed."""
        self._end = self.clock.mark()

    @contextmanager
    def action(self, action: ScheduleAction) -> Iterator[None]:
        self._waits, start = [], self.clock.mark()
        yield
        self._done.append((action, start, self.clock.mark(), self._waits))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = self.clock.mark()
        yield
        self._waits.append((start, self.clock.mark()))

    @property
    def took_us(self) -> float:
        return self.clock.elapsed_us(self._start, self._end)

    def done(self) -> list[TimedAction]:
        """Computations, in order, without actions that only start a transfer."""
        since = self.clock.elapsed_us
        return [TimedAction(action, since(self._start, start), since(self._start, end), sum(since(*wait) for wait in waits))
                for action, start, end, waits in self._done if action.computes]


class _OpenRecords(list[tuple[Clock, list[LoopTimes]]]):
    """The innermost `recording` last; its clock is used."""


@contextmanager
def recording(clock: Clock) -> Iterator[list[LoopTimes]]:
    """Record each loop that this rank runs inside."""
    found: list[LoopTimes] = []
    records = state_of(_OpenRecords)
    records.append((clock, found))
    try:
        yield found
    finally:
        records.pop()


def loop_times() -> LoopTimes | None:
    """A new record for a loop that begins now, added to all open `recording`s; None without one."""
    records = state_of(_OpenRecords)
    if not records:
        return None
    times = LoopTimes(records[-1][0])
    for _, found in records:
        found.append(times)
    return times


def note_sent(sent_bytes: int) -> None:
    """Add to the bytes that the latest loop has sent."""
    records = state_of(_OpenRecords)
    if records and records[-1][1]:
        records[-1][1][-1].sent_bytes += sent_bytes
