"""Time that this rank itself takes in calls of a compiled graph: without waiting for other ranks."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from hpml_compiler.runtime.process.device_clock import Waits
from passes import compat
from passes.session_state import state_of

THIRDS = 3
Marks = tuple[Any, Any, list[tuple[Any, Any]]]
"""Start and end of a call, and of each wait for a collective in it."""


class WaitWatch:
    """Lets `Waits` see the waits for collectives of compiled graphs, until the session ends. works: torch lets it."""

    def __init__(self) -> None:
        self.waits = state_of(Waits)
        self._undo: Callable[[], None] | None = compat.watch_waits(self.waits.begins, self.waits.ends)

    @property
    def works(self) -> bool:
        return self._undo is not None

    def close(self) -> None:
        if self._undo is not None:
            self._undo()


class OwnTimes:
    """Times of the calls of one half of a graph."""

    def __init__(self) -> None:
        self._calls: list[Marks] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        watch = state_of(WaitWatch).waits
        if watch.noted is not None:  # inside of another measured call, whose time this is
            yield
            return
        watch.noted = waits = []
        start = watch.clock.mark()
        try:
            yield
        finally:
            watch.noted = None
            self._calls.append((start, watch.clock.mark(), waits))

    def median_s(self) -> float:
        """Median of the means of thirds of the calls so far, which are forgotten; 0 with fewer than three.

        A median of calls is blind to a rank that is interrupted in fewer than half of them, a mean to one long disturbance.
        """
        clock, calls = state_of(WaitWatch).waits.clock, self._calls
        self._calls = []
        own = [clock.elapsed_us(start, end) - sum(clock.elapsed_us(*wait) for wait in waits) for start, end, waits in calls]
        if len(own) < THIRDS:
            return 0.0
        ends = [k * len(own) // THIRDS for k in range(THIRDS + 1)]
        return median(fmean(own[start:stop]) for start, stop in pairwise(ends)) / 1e6

    def forget(self) -> None:
        self._calls = []
