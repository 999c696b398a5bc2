from __future__ import annotations

import itertools
import math

import networkx as nx
from hypothesis import given, settings

from passes.solver import Arc, Choice, Edge, Entity, Problem
from passes.solver.exhaustive_search import brute_force
from tests.passes.solver.random_problems import problems


def every_assignment(problem: Problem) -> float:
    """The lowest cost over all assignments, one by one, with networkx's shortest paths; inf if none is allowed."""
    graphs = []
    for edge in problem.edges:
        graph = nx.MultiDiGraph()
        graph.add_weighted_edges_from((arc.source, arc.target, arc.cost) for arc in edge.arcs)
        graphs.append(graph)
    best = math.inf
    for chosen in itertools.product(*(range(len(entity.choices)) for entity in problem.entities)):
        if problem.budget_bytes is not None and max(problem.held_bytes(chosen)) > problem.budget_bytes:
            continue
        cost = sum(e.multiplicity * e.choices[c].cost for e, c in zip(problem.entities, chosen, strict=True))
        for edge, graph in zip(problem.edges, graphs, strict=True):
            supplied = problem.supplied(edge, chosen[edge.source])
            demanded = problem.demanded(edge, chosen[edge.target])
            if demanded is None or supplied == demanded:
                continue
            try:
                cost += edge.multiplicity * nx.dijkstra_path_length(graph, supplied, demanded)
            except (nx.NodeNotFound, nx.NetworkXNoPath):
                cost = math.inf
                break
        best = min(best, cost)
    return best


@settings(max_examples=150, deadline=None)
@given(problems(most_entities=4))
def test_cutting_branches_loses_nothing(problem):
    expected, found = every_assignment(problem), brute_force(problem)
    assert math.isclose(found.cost, expected, rel_tol=1e-9)
    assert found.status == ("infeasible" if math.isinf(expected) else "optimal")
    if found.status == "optimal":
        assert problem.held_bytes(found.chosen) == found.held_bytes
        assert problem.budget_bytes is None or max(found.held_bytes) <= problem.budget_bytes


def test_the_cheapest_path_of_several_arcs_is_taken_and_counted_with_its_multiplicity():
    arcs = (Arc("S", "R", 9.0), Arc("S", "P", 1.0), Arc("P", "R", 2.0))
    entities = (Entity("a", "op", 1, (Choice(1.0, (0.0,), (), ("S",)),)),
                Entity("b", "op", 5, (Choice(1.0, (0.0,), ("R",), ()),)))
    solution = brute_force(Problem(entities, (Edge(0, 0, 1, 0, 4, arcs, "value"),)))
    assert solution.cost == 1 + 5 + 4 * 3
    assert solution.paths == ((arcs[1], arcs[2]),)
