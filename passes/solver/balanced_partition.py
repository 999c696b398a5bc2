"""Cut a sequence of units into stages of nearly equal time, with few bytes crossing."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

SLACK = 0.05
"""A cut may make the slowest stage this much longer, if fewer bytes cross."""

_Worse = tuple[float, float]


def equal_cut(times: Sequence[float], crossing: Sequence[float], stages: int) -> list[int] | None:
    """Index of the first unit after each stage: increasing, the last is `len(times)`.

    The slowest stage takes the least possible time or up to `SLACK` more, and of all such cuts the least bytes cross. Of these,
    the slowest stage is as fast as it can be, and then all are as even as they can be: where a rank has several, or others
    wait for the first ones, it matters how many are slow.
    crossing: for each unit but the last, the bytes that cross after it. Every stage has a positive time; None if that is
    impossible.
    """
    total = [0.0]
    for time in times:
        total.append(total[-1] + time)

    def took(start: int, stop: int) -> float:
        return total[stop] - total[start]

    slowest = _best(len(times), stages, lambda cost, start, stop: (
        (max(cost[0], took(start, stop)), 0.0) if took(start, stop) > 0 else None))
    if slowest is None:
        return None
    most = slowest[0][0] * (1 + SLACK)
    cheapest = _best(len(times), stages, lambda cost, start, stop: (
        (cost[0] + (crossing[start - 1] if start else 0.0), max(cost[1], took(start, stop)))
        if 0 < took(start, stop) <= most else None))
    assert cheapest is not None, "the fastest cut is fast enough"
    most = cheapest[0][1]
    even = _best(len(times), stages, lambda cost, start, stop: (
        (cost[0] + (crossing[start - 1] if start else 0.0), cost[1] + took(start, stop) ** 2)
        if 0 < took(start, stop) <= most else None))
    assert even is not None, "the cheapest cut is one of these"
    return even[1]


def _best(units: int, stages: int, extended: Callable[[_Worse, int, int], _Worse | None],
          ) -> tuple[_Worse, list[int]] | None:
    """The least cost of cutting `units` into `stages`, and the cuts. extended: the cost with one more stage of the units from
    start to stop; None if there may be no such stage."""
    best: list[tuple[_Worse, list[int]] | None] = [((0.0, 0.0), []), *(None for _ in range(units))]
    for stage in range(stages):
        following: list[tuple[_Worse, list[int]] | None] = [None] * (units + 1)
        for stop in range(stage + 1, units - (stages - stage - 1) + 1):
            least: _Worse = (math.inf, math.inf)
            for start in range(stage, stop):
                before = best[start]
                cost = extended(before[0], start, stop) if before is not None else None
                if before is not None and cost is not None and cost < least:
                    least, following[stop] = cost, (cost, [*before[1], stop])
        best = following
    return best[units]
