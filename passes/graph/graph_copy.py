"""Copy a graph for a trial rewrite."""
from __future__ import annotations

from torch import fx

from passes.compat import graph_module


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A separate graph with the annotations, over the same attributes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta.update(gm.graph.output_node().meta)
    copy = graph_module(gm, graph)
    copy.meta.update(gm.meta)
    return copy
