"""Explain why a placement problem has no solution: the smallest feasible budget, or edges that cannot be met together."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from passes.errors import Infeasible
from passes.solver.problem import Arc, Choice, Edge, Entity, Label, Problem, Solution
from passes.solver.reduction import NoAssignment
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

Find = Callable[[Problem, SolverOptions, WorkLimit], Solution]  # raises NoAssignment

_UNMET, _NOTHING = "\0unmet", "\0nothing"  # labels that no caller uses
_NAMED = 3  # edges that the message names


def explain(problem: Problem, options: SolverOptions, allowance: WorkLimit, find: Find) -> Infeasible:
    """The error for `problem`, which has no solution. `find` solves auxiliary problems, within `allowance`.

    Where a larger budget would do, the error has the attribute `smallest_budget_bytes`.
    """
    if problem.budget_bytes is not None:
        try:
            least = _smallest_budget(problem, options, allowance, find)
        except NoAssignment:  # no budget would do
            return explain(replace(problem, budget_bytes=None), options, allowance, find)
        return _over_budget(problem, least)
    return _without_path(problem, find(_unmet_as_cost(problem), options, allowance))


@dataclass(frozen=True)
class _SmallestBudget:
    """No budget below `bound` works, `budget` does (infinite: none is known). The two are equal if that is proven."""

    bound: float
    budget: float


def _smallest_budget(problem: Problem, options: SolverOptions, allowance: WorkLimit, find: Find) -> _SmallestBudget:
    """The smallest budget that every position allows: to the byte, if the time suffices.

    Each position alone gives a bound. If minimizing one position needs more at another, the budget is bisected in between.
    """
    bound, budget, proven = 0.0, math.inf, True
    for k in range(len(problem.positions)):
        found = find(_bytes_as_cost(problem, k), options, allowance)
        bound = max(bound, found.held_bytes[k] if found.status == "optimal" else found.bound)
        budget = min(budget, max(found.held_bytes))
        proven = proven and found.status == "optimal"
    middle = bound
    while budget > bound and proven:
        if allowance.is_over:
            break
        try:
            tried = replace(_bytes_as_cost(problem, None), budget_bytes=middle)
            found = find(tried, replace(options, gap=0.5), allowance)
        except NoAssignment:
            bound = min(math.floor(middle) + 1.0, budget)
        else:
            if found.status == "no_solution":
                break
            budget = max(found.held_bytes)
        middle = max(bound, (bound + budget) // 2)
    return _SmallestBudget(bound, budget)


def _over_budget(problem: Problem, least: _SmallestBudget) -> Infeasible:
    where = f"budget of {_bytes(problem.budget_bytes or 0.0)} on each device"
    smallest = least.budget
    if math.isinf(smallest):
        return Infeasible("no assignment fits the memory budget", where,
                          f"set it to more than {_bytes(least.bound)}; a longer time limit tells to how much")
    exactly = "smallest that works" if smallest <= least.bound else "smallest known to work"
    error = Infeasible(f"no assignment fits the memory budget; the {exactly} is {_bytes(smallest)}", where,
                       f"set the budget to at least {math.ceil(smallest)} bytes, or use more devices")
    error.smallest_budget_bytes = smallest
    return error


def _without_path(problem: Problem, closest: Solution) -> Infeasible:
    unmet = [edge for edge, path in zip(problem.edges, closest.paths, strict=False)
             if any(arc.target == _UNMET for arc in path)]
    parts = []
    for edge in unmet[:_NAMED]:
        source, target = problem.entities[edge.source], problem.entities[edge.target]
        parts.append(f"edge {edge.name!r} from {source.name!r} (supplies {_labels(problem, edge, supplied=True)}) "
                     f"to {target.name!r} (demands {_labels(problem, edge, supplied=False)})")
    if len(unmet) > _NAMED:
        parts.append(f"and {len(unmet) - _NAMED} more")
    return Infeasible("no assignment meets every edge: no path of arcs leads from a supplied label to the demanded one",
                      "; ".join(parts) or "unknown: the time limit ended the search for the edge",
                      "add a choice to one of these entities or an arc to the edge; replicated labels fit everywhere")


def _labels(problem: Problem, edge: Edge, supplied: bool) -> str:
    choices = problem.entities[edge.source if supplied else edge.target].choices
    labels = {c.outputs[edge.source_port] if supplied else c.inputs[edge.target_port] for c in choices}
    return ", ".join(sorted("nothing" if label is None else label for label in labels))


def _bytes_as_cost(problem: Problem, position: int | None) -> Problem:
    """The same choices, minimizing bytes at one position or in all; arcs are free, and there is no
    budget."""

    def cost(held: tuple[float, ...]) -> float:
        return math.fsum(held) if position is None else held[position]

    arcs = {id(edge.arcs): tuple(replace(arc, cost=0.0) for arc in edge.arcs) for edge in problem.edges}
    entities = tuple(
        replace(entity, choices=tuple(replace(choice, cost=cost(choice.held_bytes)) for choice in entity.choices))
        for entity in problem.entities
    )
    edges = tuple(replace(edge, arcs=arcs[id(edge.arcs)]) for edge in problem.edges)
    return replace(problem, entities=entities, edges=edges, budget_bytes=None)


def _unmet_as_cost(problem: Problem) -> Problem:
    """The same choices, minimizing unmet edges: for cost 1, `_UNMET` turns any label into any other."""

    def supplying(choice: Choice) -> Choice:
        return Choice(0.0, (0.0,), choice.inputs, tuple(_NOTHING if label is None else label for label in choice.outputs))

    entities = tuple(Entity(e.name, e.kind, 1, tuple(map(supplying, e.choices))) for e in problem.entities)
    edges = []
    for edge in problem.edges:
        supplied = {choice.outputs[edge.source_port] for choice in entities[edge.source].choices}
        demanded: set[Label] = {
            label for choice in entities[edge.target].choices if (label := choice.inputs[edge.target_port]) is not None
        }
        arcs = [Arc(arc.source, arc.target, 0.0) for arc in edge.arcs]
        arcs += [Arc(label, _UNMET, 1.0) for label in sorted(filter(None, supplied))]
        arcs += [Arc(_UNMET, label, 0.0) for label in sorted(demanded)]
        edges.append(replace(edge, multiplicity=1, arcs=tuple(arcs)))
    return Problem(entities, tuple(edges))


def _bytes(amount: float) -> str:
    """`amount` formatted, rounded up, so that a budget of the printed size works."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{math.ceil(amount / size * 1000) / 1000:.3f} {unit}"
    return f"{math.ceil(amount)} B"
