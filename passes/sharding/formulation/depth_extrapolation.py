"""Extrapolate a problem to any depth from the problems of two depths of one model.

Each further layer adds the same instances of the same classes: multiplicities are linear in depth, everything else is
equal. That is checked, not assumed: entities and edges of both problems must correspond in order.
"""
from __future__ import annotations

from dataclasses import fields, replace

from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.oracle.cost_check import DecisionCost
from passes.solver.problem import Problem


class DepthsDiffer(Exception):
    """The two problems do not correspond: the model does not repeat itself as its module lists suggest."""


def extrapolate(long: PlacementProblem, short: PlacementProblem, further: int) -> Problem:
    """The problem with `further` more layers than `long`, which has one more than `short`. Raises DepthsDiffer."""
    a, b = long.problem, short.problem
    if len(a.entities) != len(b.entities) or len(a.edges) != len(b.edges):
        raise DepthsDiffer
    entities, edges = [], []
    for x, y in zip(a.entities, b.entities, strict=True):
        if x.kind != y.kind or x.choices != y.choices:
            raise DepthsDiffer
        entities.append(replace(x, multiplicity=_more(x.multiplicity, y.multiplicity, further)))
    for x, y in zip(a.edges, b.edges, strict=True):
        if (x.source, x.source_port, x.target, x.target_port, x.arcs) != (
            y.source, y.source_port, y.target, y.target_port, y.arcs
        ):
            raise DepthsDiffer
        edges.append(replace(x, multiplicity=_more(x.multiplicity, y.multiplicity, further)))
    return replace(a, entities=tuple(entities), edges=tuple(edges))


def _more(long: int, short: int, further: int) -> int:
    if long < short:
        raise DepthsDiffer
    return long + further * (long - short)


def extrapolate_cost(long: DecisionCost, short: DecisionCost, further: int) -> DecisionCost:
    return DecisionCost(**{
        f.name: getattr(long, f.name) + further * (getattr(long, f.name) - getattr(short, f.name))
        for f in fields(DecisionCost)
    })
