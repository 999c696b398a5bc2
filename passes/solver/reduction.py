"""Reduce a placement problem without losing its optimum, before any variable is created.

Repeated until nothing changes:

- *unmet*: a choice is dropped when on some edge no choice at the other end fits it;
- *settled*: an edge whose cost is (a number per source choice) + (a number per target choice) is removed, and the numbers are
  added to the choices; so are edges with a single label at one end and edges from an entity to itself;
- *over budget*: a choice is dropped when at some position the budget is exceeded even with the lightest choices elsewhere;
- *dominated*: a choice is dropped when another one, plus the collectives that turn its labels into those of the first, costs
  no more (nor is heavier at any position if there is a budget). By the triangle inequality this holds whatever the neighbors
  choose.

Without a budget bytes break ties only. Once an assignment is known, choices and paths that alone cost more are dropped (`cap`).
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from passes.solver.cheapest_paths import Paths
from passes.solver.problem import Arc, Problem

_ROUNDING = 1e-12  # relative: sums of a few numbers


class NoAssignment(Exception):
    """The reduction has found that no assignment meets every edge and the budget; it does not say why."""


@dataclass
class Reduced:
    """A reduced problem; all lists are indexed as its entities or edges.

    Per entity: candidates, original indices of the remaining choices, (n,) ints; costs (settled edges included),
    (n,) floats, and held_bytes, (n, positions) floats, of these, for all instances together; open_at, its edges
    that are not settled.
    Per edge: paths; supply and demand, the index into the paths' table of each candidate's label, (n,) ints.
    spare_cost: edges that cost more are useless (`cap`).
    """

    problem: Problem
    candidates: list[np.ndarray]
    costs: list[np.ndarray]
    held_bytes: list[np.ndarray]
    open_at: list[list[int]]
    paths: list[Paths]
    supply: list[np.ndarray]
    demand: list[np.ndarray]
    spare_cost: float = math.inf
    _edge_costs: dict[tuple[int, int, float], np.ndarray] = field(default_factory=dict)

    @property
    def open_edges(self) -> list[int]:
        """Indices of the edges that are not settled, in order."""
        return sorted({edge for edges in self.open_at for edge in edges})

    @property
    def lower_bound(self) -> float:
        """The sum of every entity's cheapest candidate: no assignment costs less."""
        return math.fsum(float(cost.min()) for cost in self.costs)

    def edge_cost(self, edge: int) -> np.ndarray:
        """The cost of all instances of the edge by label index, (labels + 1, labels + 1), inf where it cannot be met. Edges
        share these arrays: do not change them."""
        paths, multiplicity = self.paths[edge], self.problem.edges[edge].multiplicity
        key = (id(paths), multiplicity, self.spare_cost)
        if key not in self._edge_costs:
            cost = paths.cost.copy()
            cost[np.isfinite(cost)] *= multiplicity  # 0 * inf would be nan
            cost[cost > self.spare_cost] = math.inf
            self._edge_costs[key] = cost
        return self._edge_costs[key]

    def pair_costs(self, edge: int) -> np.ndarray:
        """The same by candidates of its source and of its target."""
        return self.edge_cost(edge)[self.supply[edge][:, None], self.demand[edge]]

    def useful_arcs(self, edge: int) -> list[Arc]:
        """The arcs of an open edge that cheapest paths between its candidates' labels take."""
        supply, demand = np.unique(self.supply[edge]), np.unique(self.demand[edge])
        met = np.isfinite(self.edge_cost(edge)[np.ix_(supply, demand)])
        sources, targets = np.nonzero(met)
        return self.paths[edge].useful_arcs(supply[sources], demand[targets])

    def original(self, picked: list[int]) -> tuple[int, ...]:
        """Choice indices of the problem, given a candidate's position for each entity."""
        return tuple(int(left[p]) for left, p in zip(self.candidates, picked, strict=True))


def reduce(problem: Problem) -> Reduced:
    """Reduce `problem`. Raises `NoAssignment` if that shows it to be infeasible."""
    reduced = unreduced(problem)
    _shrink(reduced, set(range(len(problem.entities))), dominated=True)
    return reduced


def cap(reduced: Reduced, picked: list[int], most: float) -> list[int]:
    """Drop the choices and paths that no assignment for `most` or less can use; changes `reduced` in place.

    picked: positions of an assignment that costs no more; none of its choices are dropped. Returns their new positions.
    """
    chosen = reduced.original(picked)
    reduced.spare_cost = most * (1 + _ROUNDING) - reduced.lower_bound
    changed = {reduced.problem.edges[edge].source for edge in reduced.open_edges}
    for entity, cost in enumerate(reduced.costs):
        added = cost - cost.min()
        changed |= _keep(reduced, entity, added <= max(reduced.spare_cost, added[picked[entity]]))
    _shrink(reduced, changed, dominated=False)  # a dominating choice may be another equally good one
    return [int(np.searchsorted(left, choice)) for left, choice in zip(reduced.candidates, chosen, strict=True)]


def _shrink(reduced: Reduced, changed: set[int], dominated: bool) -> None:
    while changed:
        work, changed = changed, set()
        for edge in sorted({edge for entity in work for edge in reduced.open_at[entity]}):
            changed |= _simplify(reduced, edge)
        changed |= _drop_over_budget(reduced)
        for entity in sorted(work | changed) if dominated else ():
            changed |= _drop_dominated(reduced, entity)


def sizes_of(problem: Problem) -> tuple[int, int]:
    """Size of the reduction: (choices at the ends of edges, pairs of choices of an entity by edges at it)."""
    counts = [len(entity.choices) for entity in problem.entities]
    ends = [entity for edge in problem.edges for entity in {edge.source, edge.target}]
    return sum(counts[entity] for entity in ends), sum(counts[entity] ** 2 for entity in (*ends, *range(len(counts))))


def unreduced(problem: Problem) -> Reduced:
    """All of `problem`, in the form that `reduce` works on."""
    tables: dict[tuple[int, frozenset], Paths] = {}  # edges often share their arcs
    paths, supply, demand = [], [], []
    for edge in problem.edges:
        supplied = [choice.outputs[edge.source_port] for choice in problem.entities[edge.source].choices]
        demanded = [choice.inputs[edge.target_port] for choice in problem.entities[edge.target].choices]
        labels = frozenset(label for label in (*supplied, *demanded) if label is not None)
        key = (id(edge.arcs), labels)
        if key not in tables:
            tables[key] = Paths(edge.arcs, sorted(labels))
        paths.append(tables[key])
        supply.append(np.array([tables[key].index[label] for label in supplied]))
        demand.append(np.array([tables[key].index[label] for label in demanded]))
    entities = problem.entities
    open_at: list[list[int]] = [[] for _ in entities]
    for index, edge in enumerate(problem.edges):
        for entity in {edge.source, edge.target}:
            open_at[entity].append(index)
    return Reduced(
        problem,
        candidates=[np.arange(len(entity.choices)) for entity in entities],
        costs=[e.multiplicity * np.array([c.cost for c in e.choices], dtype=float) for e in entities],
        held_bytes=[e.multiplicity * np.array([c.held_bytes for c in e.choices], dtype=float) for e in entities],
        open_at=open_at,
        paths=paths,
        supply=supply,
        demand=demand,
    )


def _keep(reduced: Reduced, entity: int, kept: np.ndarray) -> set[int]:
    """Keep the candidates of `entity` where `kept` (bools) is true; returns {entity} if some are dropped, else nothing."""
    if kept.all():
        return set()
    if not kept.any():
        raise NoAssignment
    for values in (reduced.candidates, reduced.costs, reduced.held_bytes):
        values[entity] = values[entity][kept]
    for edge in reduced.open_at[entity]:
        if reduced.problem.edges[edge].source == entity:
            reduced.supply[edge] = reduced.supply[edge][kept]
        if reduced.problem.edges[edge].target == entity:
            reduced.demand[edge] = reduced.demand[edge][kept]
    return {entity}


def _simplify(reduced: Reduced, edge: int) -> set[int]:
    """Drop choices that fit none at the other end of `edge`, and move its cost into the choices at its ends if that is exact.
    Returns the entities that this changed."""
    source, target = reduced.problem.edges[edge].source, reduced.problem.edges[edge].target
    if source == target:
        own = reduced.edge_cost(edge)[reduced.supply[edge], reduced.demand[edge]]
        _keep(reduced, source, np.isfinite(own))
        reduced.costs[source] = reduced.costs[source] + own[np.isfinite(own)]
        reduced.open_at[source].remove(edge)
        return {source}
    pairs = reduced.pair_costs(edge)
    met: np.ndarray = np.isfinite(pairs)
    changed = set[int]()
    if not met.all():
        changed = _keep(reduced, source, np.any(met, axis=1)) | _keep(reduced, target, np.any(met, axis=0))
        pairs = reduced.pair_costs(edge) if changed else pairs
        if not changed or np.isinf(pairs).any():
            return changed
    of_source = pairs.min(axis=1)
    of_target = pairs.min(axis=0) - of_source.min()
    if 1 not in pairs.shape and (np.abs(of_source[:, None] + of_target - pairs) > _ROUNDING * pairs).any():
        return changed
    reduced.costs[source] = reduced.costs[source] + of_source
    reduced.costs[target] = reduced.costs[target] + of_target
    for entity in (source, target):
        reduced.open_at[entity].remove(edge)
    return {source, target}


def _drop_over_budget(reduced: Reduced) -> set[int]:
    budget = reduced.problem.budget_bytes
    if budget is None or not reduced.held_bytes:
        return set()
    counts = [len(held) for held in reduced.held_bytes]
    held = np.concatenate(reduced.held_bytes)
    lightest = np.minimum.reduceat(held, np.cumsum([0, *counts[:-1]]))
    spare = budget - np.array([math.fsum(column) for column in lightest.T.tolist()]) + _ROUNDING * budget
    fits = (held - np.repeat(lightest, counts, axis=0) <= spare).all(axis=1)
    if fits.all():
        return set()
    losing: set[int] = set()
    for entity, kept in enumerate(np.split(fits, np.cumsum(counts[:-1]))):
        losing |= _keep(reduced, entity, kept)
    return losing


def _drop_dominated(reduced: Reduced, entity: int) -> set[int]:
    """Drop dominated choices of `entity`; returns {entity} if there were any, else nothing."""
    cost, held = reduced.costs[entity], reduced.held_bytes[entity]
    if len(cost) == 1:
        return set()
    loss = cost[:, None] - cost[None, :]  # (a, b): extra cost of a, redistributed to look like b
    for edge in reduced.open_at[entity]:
        between, supply, demand = reduced.edge_cost(edge), reduced.supply[edge], reduced.demand[edge]
        if reduced.problem.edges[edge].source == entity:
            loss += between[supply[:, None], supply]
        else:
            loss += between[demand, demand[:, None]]
    replaces = loss <= 0
    if reduced.problem.budget_bytes is not None:
        replaces &= (held[:, None] <= held[None, :]).all(axis=2)
    np.fill_diagonal(replaces, False)
    kept = np.ones(len(cost), dtype=bool)
    for candidate in np.lexsort((*held.T[::-1], cost))[::-1]:  # most expensive first, so that of equals the lightest stays
        kept[candidate] = not (replaces[:, candidate] & kept).any()
    return _keep(reduced, entity, kept)
