"""Pass: the planner's view of a graph, with rules, strategies and factors."""
from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from passes.analyses.flops import FLOPS
from passes.analyses.partitioner_choice import saved_values
from passes.analyses.placement_graph_builder import build_placement_graph
from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.graph.planning_keys import GRAPH_SIGNATURE, OPERATIONS, Operations
from passes.json_records import FrozenMap
from passes.registry import register


@register
@dataclass(frozen=True)
class FindOperations(AnalysisPass):
    """Writes OPERATIONS. The graph should be normalized before. microbatches: number of microbatches in a step. leaves: outputs
    besides the loss may stay sharded."""

    name = "find_operations"
    requires = (FLOPS, GRAPH_SIGNATURE)
    provides = (OPERATIONS,)

    microbatches: int = 1
    leaves: bool = True

    def run(self, graph_module: fx.GraphModule) -> None:
        interface = read(GRAPH_SIGNATURE, graph_module)
        graph, rules = build_placement_graph(
            graph_module, interface.kinds, interface.outputs, lambda node: read(FLOPS, node),
            trainable=interface.trainable, microbatches=self.microbatches,
        )
        inputs = {value.name: value.index for value in graph.values if value.producer is None}
        left = interface.unread if self.leaves else ()
        graph = replace(graph, unread=FrozenMap({
            graph.outputs[each.number][0]: None if each.tangent is None else inputs[each.tangent]
            for each in left}))
        if interface.training:
            graph = replace(graph, saved=saved_values(graph_module, graph, interface.forward_outputs))
        write(OPERATIONS, graph_module, Operations(graph, rules))
