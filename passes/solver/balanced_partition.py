"""Cut a sequence of units into stages of nearly equal time, with few bytes crossing."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

SLACK = 0.05
"""A cut may make the slowest stage this much longer, if fewer bytes cross."""

_Worse = tuple[float, float]


def equal_cut(times: Sequence[float], crossing: Sequence[float], stages: int, ranks: Sequence[int] = (),
              speeds: Sequence[float] = ()) -> list[int] | None:
    """Index of the first unit after each stage: increasing, the last is `len(times)`.

    The slowest stage takes the least possible time or up to `SLACK` more, and of all such cuts the least bytes cross. Of these,
    the slowest stage is as fast as it can be, and then all are as even as they can be: since others wait for
    the first ones, it matters how many are slow. ranks: of the stages; where a rank has several, units move from the rank with
    most work to others; none has less than the least one before. speeds: by rank, by which the times of its units are divided;
    equal by default.
    crossing: for each unit but the last, the bytes that cross after it. Every stage has a positive time; None if that is
    impossible.
    """
    total = [0.0]
    for time in times:
        total.append(total[-1] + time)

    of_rank = ranks or range(stages)
    slowness = [1 / speeds[of_rank[stage]] if speeds else 1.0 for stage in range(stages)]

    def took(stage: int, start: int, stop: int) -> float:
        return slowness[stage] * (total[stop] - total[start])

    slowest = _best(len(times), stages, lambda cost, *stage: (
        (max(cost[0], took(*stage)), 0.0) if took(*stage) > 0 else None))
    if slowest is None:
        return None
    most = slowest[0][0] * (1 + SLACK)
    cheapest = _best(len(times), stages, lambda cost, stage, start, stop: (
        (cost[0] + (crossing[start - 1] if start else 0.0), max(cost[1], took(stage, start, stop)))
        if 0 < took(stage, start, stop) <= most else None))
    assert cheapest is not None, "the fastest cut is fast enough"
    most = cheapest[0][1]
    even = _best(len(times), stages, lambda cost, stage, start, stop: (
        (cost[0] + (crossing[start - 1] if start else 0.0), cost[1] + took(stage, start, stop) ** 2)
        if 0 < took(stage, start, stop) <= most else None))
    assert even is not None, "the cheapest cut is one of these"
    if len(set(ranks)) in (0, stages):
        return even[1]
    least = min(took(*stage) for stage in _runs(even[1])) * (1 - 1e-9)
    return _over_ranks(even[1], ranks, took, lambda ends: (
        all(least <= took(*stage) <= most * (1 + 1e-9) for stage in _runs(ends))
        and sum(crossing[stop - 1] for stop in ends[:-1]) <= even[0][0]))


def _runs(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Number, first unit and end of each stage."""
    yield from ((stage, start, stop) for stage, (start, stop) in enumerate(zip([0, *ends], ends)))


def _over_ranks(ends: list[int], ranks: Sequence[int], took: Callable[[int, int, int], float],
                allowed: Callable[[list[int]], bool]) -> list[int]:
    """Move one unit at a time from a stage of the rank with most work to one of another rank; the stages between them shift by
    a unit. Of equally good stages, an early one of the last turn gets it: there, the fewest others wait. A cut is better if the
    slowest rank has less work, then if ranks are more even, then if stages are."""
    turns = [list(ranks[:k]).count(rank) for k, rank in enumerate(ranks)]

    def work(ends: list[int]) -> list[float]:
        found = [0.0] * (max(ranks) + 1)
        for stage in _runs(ends):
            found[ranks[stage[0]]] += took(*stage)
        return found

    def key(ends: list[int]) -> tuple[float, float, float]:
        own, each = work(ends), [took(*stage) for stage in _runs(ends)]
        return round(max(own), 9), round(sum(us * us for us in own), 9), round(sum(us * us for us in each), 9)

    for _ in range(len(ends)):
        own = work(ends)
        most = own.index(max(own))
        moves = [(i, j) for i, rank in enumerate(ranks) if rank == most for j, other in enumerate(ranks) if other != most]
        cuts = [(j, [end + (i > j) - (i < j) if min(i, j) <= k < max(i, j) else end for k, end in enumerate(ends)])
                for i, j in moves]
        best = min(((*key(cut), -turns[j], j, cut) for j, cut in cuts if allowed(cut)), default=None)
        if best is None or best[:3] >= key(ends):
            break
        ends = best[-1]
    return ends


def _best(units: int, stages: int, extended: Callable[[_Worse, int, int, int], _Worse | None],
          ) -> tuple[_Worse, list[int]] | None:
    """The least cost of cutting `units` into `stages`, and the cuts. extended: the cost with one more stage, of this number,
    of the units from start to stop; None if there may be no such stage."""
    best: list[tuple[_Worse, list[int]] | None] = [((0.0, 0.0), []), *(None for _ in range(units))]
    for stage in range(stages):
        following: list[tuple[_Worse, list[int]] | None] = [None] * (units + 1)
        for stop in range(stage + 1, units - (stages - stage - 1) + 1):
            least: _Worse = (math.inf, math.inf)
            for start in range(stage, stop):
                before = best[start]
                cost = extended(before[0], stage, start, stop) if before is not None else None
                if before is not None and cost is not None and cost < least:
                    least, following[stop] = cost, (cost, [*before[1], stop])
        best = following
    return best[units]
