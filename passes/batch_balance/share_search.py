"""Shares of a batch between groups whose times are expensive to compute: query few, bound the rest from below."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.batch_balance.row_shares import RowShares, Together, best_shares
from passes.batch_balance.time_estimates import TimeEstimate

Ask = Callable[[int, int], "float | None"]
"""(group, rows) -> µs of its part of a step, None if that many rows do not fit its devices."""


@dataclass(frozen=True)
class ShareSearchResult:
    """The best shares with all times queried, None if there are none; `bound_us`: no shares take less, as
    far as the estimates are lower bounds; `rounds` of queries."""

    shares: RowShares | None
    bound_us: float
    rounds: int


def search_shares(estimates: Sequence[TimeEstimate], together_us: Together, ask: Ask, *, tolerance: float = 0.01,
                  most_rounds: int = 8) -> ShareSearchResult:
    """Solve with estimated times, query those of the answer, and repeat until nothing can be better.

    The answer is then within `tolerance` of the bound, unless `most_rounds` ended the search. `estimates` (all of the
    same total) learn from the queries; a group without data is first queried with a row for each device.
    """
    total = estimates[0].total
    for group, estimate in enumerate(estimates):
        least = min(estimate.devices, total)
        if not estimate.known and not estimate.knows(least):
            estimate.learn(least, ask(group, least))
    rounds = 0
    while True:
        best = best_shares([estimate.known_table() for estimate in estimates], total, together_us)
        bound = best_shares([estimate.table() for estimate in estimates], total, together_us)
        best_us = math.inf if best is None else best.step_us
        bound_us = best_us if bound is None else min(bound.step_us, best_us)
        if bound is None or best_us <= bound_us * (1 + tolerance) or rounds == most_rounds:
            return ShareSearchResult(best, bound_us, rounds)
        careful = best_shares([estimate.table(careful=True) for estimate in estimates], total, together_us)
        for group, rows in _unknown(careful, estimates) or _unknown(bound, estimates):
            estimates[group].learn(rows, ask(group, rows))
        rounds += 1


def _unknown(shares: RowShares | None, estimates: Sequence[TimeEstimate]) -> list[tuple[int, int]]:
    rows = () if shares is None else shares.rows
    return [(group, count) for group, count in enumerate(rows) if not estimates[group].knows(count)]
