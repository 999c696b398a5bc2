"""Optimal rows of a batch for each group of unlike devices: exact, from tables of times.

Groups run in parallel and wait for each other once in a step, at the all-reduce of their gradients. With b_g rows for
group g, of a batch of B, a step takes

    minimize    max_g T_g(b_g)  +  R({g : b_g > 0})
    subject to  sum_g b_g = B,  b_g an integer of at least 0,  T_g(0) = 0

T_g may be any table: inf marks infeasible rows (memory), and neither convexity nor growth is assumed, since rows
that a mesh does not divide cost more than a few more rows that it divides. R is the time of the reduction between the active
groups. For each set of groups, a dynamic program over the groups finds the least maximum; R is added then.

Among equally fast shares, the one with the least sum of times is taken: it leaves most devices free for longest.
The time is O(B) for two groups, and O(2^G B F) for G, with F finite entries per table.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from passes.errors import BadInput
from passes.hardware.cluster import MOST_GROUPS  # every set of groups is tried

Times = Sequence[float] | np.ndarray
"""µs of a group's part of a step by its rows."""

Together = Callable[[tuple[int, ...]], float]
"""µs of the gradient reduction between these groups, in ascending order; called with two groups or more."""


@dataclass(frozen=True)
class RowShares:
    """Rows of each group, and the predicted µs of the step."""

    rows: tuple[int, ...]
    step_us: float


def step_us(rows: Sequence[int], tables: Sequence[Times], together_us: Together) -> float:
    """Duration of a step with these rows: the objective above. inf if a group cannot take its rows."""
    active = tuple(g for g, count in enumerate(rows) if count)
    slowest = max((float(tables[g][rows[g]]) for g in active), default=0.0)
    return slowest + (together_us(active) if len(active) > 1 else 0.0)


def best_shares(tables: Sequence[Times], total: int, together_us: Together) -> RowShares | None:
    """The best shares of `total` rows, or None if there are none.

    tables: for each group, the µs of its part of a step with 0 to `total` rows (length total + 1); entry 0 is ignored.
    """
    if not 0 < len(tables) <= MOST_GROUPS:
        raise BadInput(f"{len(tables)} groups of devices", "shares of a batch", f"give 1 to {MOST_GROUPS} groups")
    if total < 1 or any(len(table) != total + 1 for table in tables):
        raise BadInput(f"tables of lengths {[len(t) for t in tables]} for {total} rows", "shares of a batch",
                       "give the times of 0 to all rows")
    times = [np.asarray(table, dtype=float) for table in tables]
    best: tuple[float, float, tuple[int, ...]] | None = None
    for count in range(1, len(times) + 1):
        for active in combinations(range(len(times)), count):
            extra_us = together_us(active) if count > 1 else 0.0
            limit_us = math.inf if best is None else best[0] - extra_us
            found = _split([times[g] for g in active], total, limit_us)
            if found is None:
                continue
            rows = [0] * len(times)
            for g, share in zip(active, found, strict=True):
                rows[g] = share
            spent = [float(times[g][rows[g]]) for g in active]
            candidate = (max(spent) + extra_us, math.fsum(spent), tuple(rows))
            if best is None or candidate[:2] < best[:2]:
                best = candidate
    return None if best is None else RowShares(best[2], best[0])


def _split(times: Sequence[np.ndarray], total: int, limit_us: float) -> tuple[int, ...] | None:
    """At least one row for each; the least maximum, then the least sum. None if that maximum is above `limit_us`."""
    least, _ = _program(times, total, np.maximum)
    if not least <= limit_us or math.isinf(least):
        return None
    capped = [np.where(table <= least, table, math.inf) for table in times]
    return _program(capped, total, np.add)[1]


def _program(times: Sequence[np.ndarray], total: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least `join` (maximum or sum) of the groups' times, and the rows. best[j]: for the groups so far with
    j rows together; taken[j]: the rows of the last of them. For the last group, only best[total] is needed."""
    best = np.concatenate(([math.inf], times[0][1:]))
    history = [np.arange(total + 1)]
    for table in times[1:-1]:
        after, taken = np.full(total + 1, math.inf), np.zeros(total + 1, dtype=np.int64)
        for rows in np.flatnonzero(np.isfinite(table[1:])) + 1:
            joined = join(best[: total + 1 - rows], table[rows])
            better = joined < after[rows:]
            after[rows:][better] = joined[better]
            taken[rows:][better] = rows
        best = after
        history.append(taken)
    least, left, rows = float(best[total]), total, []
    if len(times) > 1:
        joined = join(best[:0:-1], times[-1][:-1])  # at b: b rows of the last group, total - b of the others
        joined[0] = math.inf
        last = int(np.argmin(joined))
        least, left, rows = float(joined[last]), total - last, [last]
    for taken in reversed(history):
        rows.append(int(taken[left]))
        left -= rows[-1]
    return least, tuple(reversed(rows))
