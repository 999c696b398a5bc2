"""When this rank of a pipeline did what, for whoever asks: `with recording(clock) as steps:` around training steps.

Where nobody asks, nothing is recorded. Each rank has a record of its own, in time since its loop began, which is what clocks of
several machines have in common.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpml_compiler.runtime.process.device_clock import Clock
from passes.pipeline.pipeline_schedule import ScheduleAction


@dataclass(frozen=True)
class TimedAction:
    """What a rank has done, in µs since its loop began. waited_us: how long it waited for another rank's message meanwhile."""

    action: ScheduleAction
    start_us: float
    end_us: float
    waited_us: float

    @property
    def work_us(self) -> float:
        return self.end_us - self.start_us - self.waited_us


@dataclass
class LoopTimes:
    """Once through a rank's part of a schedule, or through the forward or backward half of it. sent_bytes: of this rank to
    others, in the loop and, of what it has made, after it."""

    clock: Clock
    sent_bytes: int = 0
    _done: list[tuple[ScheduleAction, Any, Any, list[tuple[Any, Any]]]] = field(default_factory=list)
    _waits: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = self._end = self.clock.mark()

    def end(self) -> None:
        """All that this rank has sent has arrived."""
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
        """What was computed, in order; without what only starts a message."""
        since = self.clock.elapsed_us
        return [TimedAction(action, since(self._start, start), since(self._start, end), sum(since(*wait) for wait in waits))
                for action, start, end, waits in self._done if action.computes]


_recorded: list[list[LoopTimes]] = []
"""Where loops are noted; the innermost `recording` is the last, whose clock is taken."""
_clocks: list[Clock] = []


@contextmanager
def recording(clock: Clock) -> Iterator[list[LoopTimes]]:
    """Notes each loop that this rank goes through from now on."""
    found: list[LoopTimes] = []
    _recorded.append(found)
    _clocks.append(clock)
    try:
        yield found
    finally:
        _recorded.pop()
        _clocks.pop()


def loop_times() -> LoopTimes | None:
    """For a loop that begins now, which all who ask are given; None if nobody asks."""
    if not _recorded:
        return None
    times = LoopTimes(_clocks[-1])
    for found in _recorded:
        found.append(times)
    return times


def note_sent(sent_bytes: int) -> None:
    """By the loop that ran last, or runs."""
    if _recorded and _recorded[-1]:
        _recorded[-1][-1].sent_bytes += sent_bytes
