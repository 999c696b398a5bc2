"""Numbers of rows by which the slowest coordinate of a mesh axis takes least time, from measured times."""
from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.08
"""Fraction of the time of a step that a move must save: less is noise, and rows would go to and fro."""


@dataclass(frozen=True)
class WorkMove:
    """Work that moves between ranks. now_s, then_s: time of the slowest before and after."""

    now_s: float
    then_s: float

    def pays(self, steps: int, cost_s: float) -> bool:
        """True if the move saves more than it costs within so many steps."""
        gain_s = self.now_s - self.then_s
        return gain_s >= LEAST_GAIN * self.now_s and gain_s * steps >= cost_s


@dataclass(frozen=True)
class RowMove(WorkMove):
    """rows: by coordinate."""

    rows: tuple[int, ...]


def best_move(rows: Sequence[int], windows: Sequence[Sequence[float]], unit: int = 1) -> RowMove:
    """The numbers of rows, with the same sum, that minimize the time of the slowest coordinate, where the time of each is
    proportional to its rows. windows: seconds of each coordinate, measured with `rows` in one or more windows of steps: rows
    follow their mean, and the gain is that of the window in which it is least, so that a disturbance moves nothing. unit: that
    all numbers of rows divide by; each coordinate keeps at least one.

    Rows are given out one unit at a time, to the coordinate that then takes least: no other way has a shorter slowest one.
    """
    of_unit = [sum(each) / len(windows) * unit / count for each, count in zip(zip(*windows), rows, strict=True)]
    found = [1] * len(rows)
    waiting = [(2 * each, k) for k, each in enumerate(of_unit)]
    heapq.heapify(waiting)
    for _ in range(sum(rows) // unit - len(rows)):
        _, k = heapq.heappop(waiting)
        found[k] += 1
        heapq.heappush(waiting, ((found[k] + 1) * of_unit[k], k))
    moved = tuple(unit * count for count in found)
    times = [(max(window), max(own * after / before for own, after, before in zip(window, moved, rows, strict=True)))
             for window in windows]
    now_s, then_s = min(times, key=lambda each: each[0] - each[1])
    return RowMove(now_s, then_s, moved)
