from __future__ import annotations

import math

import networkx as nx
import numpy as np
from hypothesis import given, settings

from passes.solver import Arc
from passes.solver.cheapest_paths import Paths
from tests.passes.solver.random_problems import LABELS, arcs


@settings(max_examples=200, deadline=None)
@given(arcs())
def test_costs_and_paths_equal_networkx(some):
    paths = Paths(some, LABELS)
    graph = nx.DiGraph()
    graph.add_nodes_from(LABELS)
    for arc in sorted(some, key=lambda arc: -arc.cost):  # the cheapest of equals last, which stays
        graph.add_edge(arc.source, arc.target, weight=arc.cost)
    for source in LABELS:
        expected = nx.single_source_dijkstra_path_length(graph, source)
        for target in LABELS:
            cost = paths.cost[paths.index[source], paths.index[target]]
            assert math.isclose(cost, expected.get(target, math.inf), rel_tol=1e-12)
            if math.isfinite(cost):
                path = paths.path(source, target)
                assert math.isclose(math.fsum(arc.cost for arc in path), cost, rel_tol=1e-12)
                labels = [source, *(arc.target for arc in path)]
                assert [arc.source for arc in path] == labels[:-1] and labels[-1] == target
                assert len(set(labels)) == len(labels)


def test_useful_arcs_leave_out_what_no_cheapest_path_takes():
    direct, first, second = Arc("R", "P", 5.0), Arc("R", "S(0)", 1.0), Arc("S(0)", "P", 1.0)
    aside, slower = Arc("S(0)", "S(1)", 1.0), Arc("R", "S(0)", 2.0)
    paths = Paths((direct, slower, first, second, aside), ())
    ends = np.array([["R", "P"], ["P", "P"], ["R", None]], dtype=object)
    indices = np.vectorize(paths.index.get)(ends)
    assert paths.useful_arcs(indices[:, 0], indices[:, 1]) == [first, second]


def test_fewer_arcs_among_equally_cheap_paths_and_free_circles_end():
    arcs = (Arc("R", "S(0)", 0.0), Arc("S(0)", "R", 0.0), Arc("S(0)", "P", 2.0), Arc("R", "P", 2.0))
    paths = Paths(arcs, ())
    assert paths.path("R", "P") == (arcs[3],)
    assert paths.path("S(0)", "P") == (arcs[2],)


def test_nothing_is_free_to_demand_and_of_no_use_when_supplied():
    paths = Paths((Arc("R", "P", 1.0),), ("R", "P", "S(0)"))
    nothing = paths.index[None]
    assert (paths.cost[:, nothing] == 0).all()
    assert np.isinf(paths.cost[nothing, :nothing]).all()
    assert paths.path("R", None) == ()
