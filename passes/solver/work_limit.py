"""Work limit of a search. Work is counted, not timed, so that the same input gives the same answer on a busy machine.

`US` is the one table of times per unit of work. It overestimates rather than underestimates: the count ends a
search before the limit is over on an idle core. CPU time ends it where the count is far off.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("hpml")

US = {
    "operation": 1000.0,  # of a graph: described, placed, written down in a plan
    "joint step": 1.0,  # one strategy of an operation after one state of the operations before it
    "combination": 35.0,  # a joint strategy for each axis, checked and priced; and for each of its operations
    "layouts": 1.5,
    "comparison": 0.006,  # of two choices, for each value that they read or make
    "hop": 18.0,  # between two layouts of a value
    "edge": 60.0,
    "entity": 150.0,
    "candidate": 1.5,  # of an entity or an edge, looked at by the reduction or in a descent
    "coefficient": 10.0,  # of a program that is written down
    "simplex iteration": 12.0,  # and for each coefficient of the program:
    "simplex coefficient": 0.0003,
    "branching": 50.0,  # HiGHS asks whether to go on; and for each coefficient of the program:
    "branching coefficient": 1.0,
    "cutting coefficient": 3.0,  # likewise, at the root, where it makes cuts
    "separation": 0.25,  # of cuts at the root, which cannot be interrupted: for each coefficient and fractional choice
    "run": 5.0,  # of a program that is walked
}
"""µs per unit of work, rounded up."""
GUARD, SLACK_S = 2.0, 5.0
"""CPU time after which a search ends regardless of the count: a multiple of the limit, plus the first use of libraries."""


class OutOfTime(Exception):
    """A strict work limit is used up."""


class WorkLimit:
    """Seconds of work for a search. parent: limit of the enclosing search, charged as well. strict: `spend` raises
    OutOfTime when it is used up; otherwise the search checks `is_over`, and ends with its best answer so far."""

    def __init__(self, seconds: float, parent: WorkLimit | None = None, strict: bool = False,
                 cpu_s: Callable[[], float] = time.thread_time):
        self.seconds = self.left_s = seconds
        self.parent, self.strict = parent, strict
        self.was_over = False
        """True if this limit, or a part of it, ended a search."""
        self._cpu_s = cpu_s
        self._end_s: float = cpu_s() + GUARD * seconds + SLACK_S if parent is None else parent._end_s

    def part(self, seconds: float, strict: bool = False) -> WorkLimit:
        return WorkLimit(seconds, self, strict, self._cpu_s)

    def spend(self, unit: str, count: float = 1.0) -> None:
        """Count work. Raises OutOfTime if the limit is strict and used up."""
        self.take(1e-6 * US[unit] * count)
        if self.strict and self.is_over:
            raise OutOfTime

    def take(self, seconds: float) -> None:
        self.left_s -= seconds
        if self.parent is not None:
            self.parent.take(seconds)

    def allows(self, unit: str, count: float = 1.0) -> bool:
        """True if that much is left."""
        return not self.is_over and 1e-6 * US[unit] * count <= self.left_s

    @property
    def guard_left_s(self) -> float:
        """CPU time until the search ends regardless of the count."""
        return max(self._end_s - self._cpu_s(), 0.0)

    @property
    def is_over(self) -> bool:
        over = self.left_s <= 0
        if not over and self._cpu_s() > self._end_s:
            over, self.left_s = True, 0.0
            log.warning("planning was cut short after %g times its time limit in CPU time, so another run may find another "
                        "plan; raise time_limit to avoid this", GUARD)
        if over:
            self._tell()
        return over

    def _tell(self) -> None:
        self.was_over = True
        if self.parent is not None:
            self.parent._tell()
