from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from passes.solver import Arc, Choice, Edge, Entity, Problem
from passes.solver.exhaustive_search import brute_force
from passes.solver.reduction import NoAssignment, reduce
from passes.solver.rounding import rounded
from tests.passes.solver.random_problems import hard_chain, tangled


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6).map(tangled), st.booleans())
def test_what_it_returns_meets_every_edge_and_the_budget(problem, prefer):
    try:
        reduced = reduce(problem)
    except NoAssignment:
        return
    picked = rounded(reduced, [len(left) - 1 for left in reduced.candidates] if prefer else None)
    if picked is None:
        return
    chosen = reduced.original(picked)
    for edge, paths in zip(problem.edges, reduced.paths, strict=True):
        supplied, demanded = problem.supplied(edge, chosen[edge.source]), problem.demanded(edge, chosen[edge.target])
        assert math.isfinite(paths.cost[paths.index[supplied], paths.index[demanded]])
    assert problem.budget_bytes is None or max(problem.held_bytes(chosen)) <= problem.budget_bytes


def test_two_neighbors_change_together():
    """Alone, either one's change to S costs more than it saves."""
    source = (Choice(5.0, (0.0,), (), ("R",)), Choice(1.0, (1.0,), (), ("S",)))
    target = (Choice(5.0, (0.0,), ("R",), ()), Choice(1.0, (1.0,), ("S",), ()))
    arcs = (Arc("R", "S", 100.0), Arc("S", "R", 100.0))
    entities = (Entity("source", "op", 1, source), Entity("target", "op", 1, target))
    for budget, expected in ((2.0, [1, 1]), (1.0, [0, 0])):
        problem = Problem(entities, (Edge(0, 0, 1, 0, 1, arcs, "value"),), budget)
        reduced = reduce(problem)
        assert reduced.original(rounded(reduced, [0] * 2) or []) == tuple(expected)
        assert brute_force(problem).chosen == tuple(expected)


def test_a_long_chain_is_brought_within_its_budget():
    problem = hard_chain()
    reduced = reduce(problem)
    cheapest = reduced.original([int(cost.argmin()) for cost in reduced.costs])
    assert max(problem.held_bytes(cheapest)) > problem.budget_bytes
    assert max(problem.held_bytes(reduced.original(rounded(reduced)))) <= problem.budget_bytes
