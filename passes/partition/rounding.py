"""A feasible assignment from any assignment: lowers one entity at a time, priced by bytes if there is a budget.

It ends a search without a MIP where the relaxation is only a little fractional, starts the MIP, and is the answer when the
time runs out. It proves nothing: bounds come from the solver.
"""
from __future__ import annotations

import math

import numpy as np

from passes.partition.reduce import Reduced

_SWEEPS = 30
_PRICES = 14  # times 4 each: spans nine orders of magnitude


def rounded(reduced: Reduced, start: list[int]) -> list[int] | None:
    """A local optimum near `start` (both: a candidate's position per entity) that meets every edge and the budget.

    None if none was found.
    """
    descent = _Descent(reduced)
    budget = reduced.problem.budget_bytes
    if budget is None or descent.held(start) <= budget:
        picked = descent.run(start, limit=budget)
        return picked if descent.met(picked) else None
    price = descent.exchange_rate() / 4 ** (_PRICES // 2)
    for _ in range(_PRICES):
        picked = descent.run(start, price=price)
        if descent.held(picked) <= budget:
            picked = descent.run(picked, limit=budget)
            if descent.met(picked):
                return picked
        price *= 4
    return None


class _Descent:
    """Coordinate descent over the candidates of a reduced problem."""

    def __init__(self, reduced: Reduced) -> None:
        self.reduced = reduced
        tables = {edge: reduced.edge_cost_us(edge) for edge in reduced.open_edges}
        dearest = [float(cost.max()) for cost in reduced.cost_us]
        dearest += [float(table[np.isfinite(table)].max()) for table in tables.values()]
        self.unmet_us = 1e3 * (1.0 + math.fsum(dearest))  # more than any assignment that meets all costs
        self.tables = {edge: np.where(np.isfinite(table), table, self.unmet_us) for edge, table in tables.items()}

    def run(self, start: list[int], price: float = 0.0, limit: float | None = None) -> list[int]:
        """Improve `start` until no entity alone can be improved.

        price: µs per byte added to the cost. limit: bytes never to be exceeded, if `start` does not exceed them.
        """
        picked = list(start)
        held = self.held(picked)
        for _ in range(_SWEEPS):
            moved = False
            for entity, bytes_of in enumerate(self.reduced.held_bytes):
                if len(bytes_of) == 1:
                    continue
                now = picked[entity]
                cost = self._costs(entity, picked) + price * bytes_of
                if limit is not None:
                    cost[bytes_of - bytes_of[now] > limit - held] = math.inf
                best = int(cost.argmin())
                if cost[best] < cost[now] * (1 - 1e-12):
                    held += float(bytes_of[best] - bytes_of[now])
                    picked[entity], moved = best, True
            if not moved:
                break
        return picked

    def _costs(self, entity: int, picked: list[int]) -> np.ndarray:
        """What each candidate of `entity` costs with all others as picked, (n,)."""
        reduced = self.reduced
        cost = reduced.cost_us[entity].copy()
        for edge in reduced.open_at[entity]:
            source, target = reduced.problem.edges[edge].source, reduced.problem.edges[edge].target
            supply, demand = reduced.supply[edge], reduced.demand[edge]
            if source == entity:
                cost += self.tables[edge][supply, demand[picked[target]]]
            else:
                cost += self.tables[edge][supply[picked[source]], demand]
        return cost

    def exchange_rate(self) -> float:
        """How many µs the choices differ by for each byte that they differ by."""
        spread_us = math.fsum(float(np.ptp(cost)) for cost in self.reduced.cost_us)
        spread_us += math.fsum(float(table.max()) for table in self.tables.values() if table.max() < self.unmet_us)
        spread_bytes = math.fsum(float(np.ptp(held)) for held in self.reduced.held_bytes)
        return max(spread_us, 1e-9) / max(spread_bytes, 1.0)

    def held(self, picked: list[int]) -> float:
        return math.fsum(float(held[p]) for held, p in zip(self.reduced.held_bytes, picked, strict=True))

    def met(self, picked: list[int]) -> bool:
        """Whether every open edge has a path."""
        for edge, table in self.tables.items():
            ends = self.reduced.problem.edges[edge]
            if table[self.reduced.supply[edge][picked[ends.source]],
                     self.reduced.demand[edge][picked[ends.target]]] >= self.unmet_us:
                return False
        return True
