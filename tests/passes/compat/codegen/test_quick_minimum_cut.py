"""The cut of the partitioner is networkx's own."""
from __future__ import annotations

import math
import random

import networkx
import pytest

from passes.compat.codegen.quick_minimum_cut import from_both_ends


def graph_of(seed: int) -> networkx.DiGraph:
    """A graph as torch's partitioner makes it: values of some weight, tied to terminals and to their readers."""
    draw = random.Random(seed)
    graph = networkx.DiGraph()
    for node in range(24):
        graph.add_edge(f"{node}_in", f"{node}_out", capacity=draw.choice([1, 2, 2, 3, 5, math.inf]))
        for reader in draw.sample(range(node + 1, 26), k=min(2, 25 - node)):
            graph.add_edge(f"{node}_out", f"{reader}_in", capacity=math.inf)
        if draw.random() < 0.3:
            graph.add_edge("source", f"{node}_in", capacity=math.inf)
        if draw.random() < 0.2:
            graph.add_edge(f"{node}_out" if draw.random() < 0.5 else f"{node}_in", "sink", capacity=draw.choice([4, math.inf]))
    graph.add_edge("source", "0_in", capacity=math.inf)
    graph.add_edge("24_in", "sink", capacity=math.inf)
    return graph


def test_value_and_smallest_side_of_the_sink_are_those_of_networkx():
    bounded = 0
    for seed in range(300):
        graph = graph_of(seed)
        try:
            expected = networkx.minimum_cut(graph, "source", "sink")
        except networkx.NetworkXUnbounded:
            with pytest.raises(networkx.NetworkXUnbounded):
                from_both_ends(networkx.minimum_cut)(graph, "source", "sink")
            continue
        bounded += 1
        assert from_both_ends(networkx.minimum_cut)(graph, "source", "sink") == expected
    assert bounded > 100
