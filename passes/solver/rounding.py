"""Round any assignment to a feasible one: meet every edge, then the budget, then reduce the cost.

It ends a search without a MIP where the relaxation is only a little fractional, starts the MIP, and is the answer when
the time runs out. It proves nothing: bounds come from the solver.
"""
from __future__ import annotations

import heapq
import math

import numpy as np

from passes.solver.reduction import Reduced
from passes.solver.work_limit import WorkLimit

_SWEEPS = 20
_WORTH = 1e-12  # relative: smaller improvements are rounding


def rounded(reduced: Reduced, preferred: list[int] | None = None, allowance: WorkLimit | None = None) -> list[int] | None:
    """A local optimum near `preferred` (both: a candidate's position per entity) that meets every edge and the budget.

    None if none was found. allowance: for improving it.
    """
    descent = _LocalSearch(reduced, allowance or WorkLimit(math.inf))
    picked = descent.construct(preferred)
    if not descent.met(picked):
        picked = descent.improve(picked)
    budget = reduced.problem.budget_bytes
    if budget is not None:
        picked = descent.lighten(picked, budget)
    if picked is not None:
        picked = descent.improve(picked, limit=budget)
    return picked if picked is not None and descent.met(picked) else None


class _LocalSearch:
    """Local search over the candidates of a reduced problem; an edge that cannot be met costs `unmet_cost`.

    between: for two entities, the sum of the costs of the edges between them by position, (first's, second's).
    """

    def __init__(self, reduced: Reduced, allowance: WorkLimit) -> None:
        self.reduced, self.allowance = reduced, allowance
        costs = {edge: reduced.pair_costs(edge) for edge in reduced.open_edges}
        dearest = [float(cost.max()) for cost in reduced.costs]
        dearest += [float(cost[np.isfinite(cost)].max(initial=0.0)) for cost in costs.values()]
        self.unmet_cost = 1e3 * (1.0 + math.fsum(dearest))  # more than any assignment that meets all edges
        self.between: dict[tuple[int, int], np.ndarray] = {}
        self.neighbors: list[list[int]] = [[] for _ in reduced.candidates]
        for index, cost in costs.items():
            edge = reduced.problem.edges[index]
            cost = np.where(np.isfinite(cost), cost, self.unmet_cost)
            for pair, table in (((edge.source, edge.target), cost), ((edge.target, edge.source), cost.T)):
                if pair not in self.between:
                    self.between[pair] = np.zeros(table.shape)
                    self.neighbors[pair[0]].append(pair[1])
                self.between[pair] = self.between[pair] + table
        self.sweep_comparisons = sum(table.size for table in self.between.values()) // 2
        self.sweep_candidates = sum(len(self.neighbors[a]) + len(self.neighbors[b]) for a, b in self.between)

    def construct(self, preferred: list[int] | None) -> list[int]:
        """Pick for one entity after another: the preferred candidate if it fits those picked, else the cheapest.

        The cost on edges to entities that are not picked yet is taken at its lowest.
        """
        picked: list[int] = []
        for entity, own in enumerate(self.reduced.costs):
            cost = own.copy()
            for other in self.neighbors[entity]:
                table = self.between[entity, other]
                cost += table[:, picked[other]] if other < entity else table.min(axis=1)
            wanted = int(cost.argmin()) if preferred is None else preferred[entity]
            picked.append(wanted if cost[wanted] < self.unmet_cost else int(cost.argmin()))
        return picked

    def improve(self, start: list[int], limit: float | None = None) -> list[int]:
        """Improve `start` until no entity and no two neighbors can be changed for the better.

        limit: bytes that `start` does not exceed at any position; the result does not, either.
        """
        picked = list(start)
        spare = (math.inf if limit is None else limit) - self._held(picked)
        for sweep in range(_SWEEPS):
            if sweep and self.allowance.is_over:
                break
            self.allowance.spend("comparison", self.sweep_comparisons)
            self.allowance.spend("candidate", self.sweep_candidates)
            moved = False
            for entity, other in ((e, o) for e in range(len(picked)) for o in (None, *self.neighbors[e])):
                if other is None:
                    added = self._added_bytes(entity, picked)[:, None]  # (candidates, other's candidates, positions)
                    cost = self._costs(entity, picked)[:, None]
                elif entity < other:
                    added = self._added_bytes(entity, picked)[:, None] + self._added_bytes(other, picked)
                    cost = (self._costs(entity, picked, skip=other)[:, None] + self._costs(other, picked, skip=entity)
                            + self.between[entity, other])
                else:
                    continue
                now = cost[picked[entity], 0 if other is None else picked[other]]
                fits = (added <= spare).all(axis=2)
                first, second = np.unravel_index(np.where(fits, cost, math.inf).argmin(), cost.shape)
                if cost[first, second] < now * (1 - _WORTH):
                    moved, spare = True, spare - added[first, second]
                    picked[entity] = int(first)
                    if other is not None:
                        picked[other] = int(second)
            if not moved:
                break
        return picked

    def lighten(self, start: list[int], limit: float) -> list[int] | None:
        """Change `start` until `limit` bytes are not exceeded at any position; None if that fails."""
        picked: list[int] | None = list(start)
        for _ in range(_SWEEPS):  # savings at some positions may add bytes at others
            if picked is None or (self._held(picked) <= limit).all():
                return picked
            picked = self._lighten(picked, limit)
        return None

    def _lighten(self, start: list[int], limit: float) -> list[int] | None:
        """Change the entity that adds least cost per byte saved, repeatedly, until no position that exceeds `limit` bytes now
        still does."""
        picked = list(start)
        over = self._held(picked) - limit
        exceeded = over > 0
        latest = [0] * len(picked)  # number of an entity's valid entry; older ones stay in the queue
        queue = [(*self._cheapest_saving(entity, picked, exceeded), entity, 0) for entity in range(len(picked))]
        heapq.heapify(queue)
        while (over[exceeded] > 0).any() and queue:
            rate, lighter, entity, number = heapq.heappop(queue)
            if number != latest[entity]:
                continue
            if math.isinf(rate):
                return None
            over += self._added_bytes(entity, picked)[lighter]
            picked[entity] = lighter
            for changed in (entity, *self.neighbors[entity]):
                latest[changed] += 1
                heapq.heappush(queue, (*self._cheapest_saving(changed, picked, exceeded), changed, latest[changed]))
        return picked

    def met(self, picked: list[int]) -> bool:
        """True if every open edge has a path."""
        return all(table[picked[a], picked[b]] < self.unmet_cost for (a, b), table in self.between.items())

    def _cheapest_saving(self, entity: int, picked: list[int], exceeded: np.ndarray) -> tuple[float, int]:
        """(µs added per byte saved at the positions `exceeded`, inf if no candidate is lighter; number of that candidate)."""
        saved = -self._added_bytes(entity, picked)[:, exceeded].sum(axis=1)
        cost = self._costs(entity, picked)
        rate = np.full(len(saved), math.inf)
        np.divide(cost - cost[picked[entity]], saved, out=rate, where=saved > 0)
        best = int(rate.argmin())
        return float(rate[best]), best

    def _costs(self, entity: int, picked: list[int], skip: int | None = None) -> np.ndarray:
        """Cost of each candidate of `entity` with all others as picked, edges to `skip` left out, (n,)."""
        cost = self.reduced.costs[entity].copy()
        for other in self.neighbors[entity]:
            if other != skip:
                cost += self.between[entity, other][:, picked[other]]
        return cost

    def _added_bytes(self, entity: int, picked: list[int]) -> np.ndarray:
        """Bytes of each candidate at each position, (n, positions)."""
        held = self.reduced.held_bytes[entity]
        return held - held[picked[entity]]

    def _held(self, picked: list[int]) -> np.ndarray:
        """Bytes at each position."""
        helds = [held[p].tolist() for held, p in zip(self.reduced.held_bytes, picked, strict=True)]
        return np.array([math.fsum(held) for held in zip(*helds)])
