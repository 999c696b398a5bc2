"""Extrapolate a problem to any depth from the problems of two depths of one model.

Each further layer adds the same instances of the same classes: multiplicities are linear in depth, everything else is
equal. That is checked, not assumed: entities of both problems must correspond in order, and edges by their ends. Only an edge
between two layers that differ from the first and the last layer of the model may be missing in the problem of the fewer layers,
which has a single such layer.
"""
from __future__ import annotations

from dataclasses import fields, replace

from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.oracle.cost_check import DecisionCost
from passes.solver.problem import Edge, Problem, Solution


class DepthsDiffer(Exception):
    """The two problems do not correspond: the model does not repeat itself as its module lists suggest."""


def extrapolate(long: PlacementProblem, short: PlacementProblem, further: int) -> Problem:
    """The problem with `further` more layers than `long`, which has one more than `short`. Raises DepthsDiffer."""
    a, b = long.problem, short.problem
    if len(a.entities) != len(b.entities):
        raise DepthsDiffer("each layer adds classes of operations")
    entities = []
    for x, y in zip(a.entities, b.entities, strict=True):
        if x.kind != y.kind or x.choices != y.choices:
            raise DepthsDiffer(f"operations differ at {x.name}")
        entities.append(replace(x, multiplicity=_more(x.multiplicity, y.multiplicity, further)))
    edges = [replace(x, multiplicity=_more(x.multiplicity, 0 if k is None else b.edges[k].multiplicity, further))
             for x, k in zip(a.edges, _same_edges(a, b), strict=True)]
    return replace(a, entities=tuple(entities), edges=tuple(edges))


def solution_of_shorter(long: PlacementProblem, short: PlacementProblem, solution: Solution) -> Solution:
    """The solution of the extrapolated problem as one of `short`, whose edges may be fewer, and in another order."""
    paths = {k: path for k, path in zip(_same_edges(long.problem, short.problem), solution.paths, strict=True)}
    return replace(solution, paths=tuple(paths[k] for k in range(len(short.problem.edges))))


def _same_edges(a: Problem, b: Problem) -> list[int | None]:
    """The position in `b` of each edge of `a`; None where `b` has none. Raises DepthsDiffer."""
    waiting = dict[tuple[int, int, int, int], list[int]]()
    for k in reversed(range(len(b.edges))):
        waiting.setdefault(_ends(b.edges[k]), []).append(k)
    found: list[int | None] = []
    for x in a.edges:
        same = waiting.get(_ends(x))
        added = {a.entities[end].multiplicity - b.entities[end].multiplicity for end in (x.source, x.target)}
        if same and b.edges[same[-1]].arcs == x.arcs:
            found.append(same.pop())
        elif same is None and added == {x.multiplicity}:
            found.append(None)
        else:
            raise DepthsDiffer(f"values differ at {x.name}")
    if any(waiting.values()):
        raise DepthsDiffer("a value of fewer layers is missing in more layers")
    return found


def _ends(edge: Edge) -> tuple[int, int, int, int]:
    return edge.source, edge.source_port, edge.target, edge.target_port


def _more(long: int, short: int, further: int) -> int:
    if long < short:
        raise DepthsDiffer("more layers have less of a class of operations")
    return long + further * (long - short)


def extrapolate_cost(long: DecisionCost, short: DecisionCost, further: int) -> DecisionCost:
    return DecisionCost(**{
        f.name: getattr(long, f.name) + further * (getattr(long, f.name) - getattr(short, f.name))
        for f in fields(DecisionCost)
    })
