"""Pass: find which inputs of a graph are parameters, and which outputs their gradients."""
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.annotations import write
from passes.base import AnalysisPass
from passes.graph.graph_signature import GraphInput, signature_of
from passes.graph.planning_keys import GRAPH_SIGNATURE
from passes.registry import register


@register
@dataclass(frozen=True)
class AnalyzeSignature(AnalysisPass):
    """Writes INTERFACE. inputs: those of the Dynamo graph, in order; forward_outputs: None for a forward graph."""

    name = "analyze_signature"
    provides = (GRAPH_SIGNATURE,)

    inputs: tuple[GraphInput, ...] = ()
    forward_outputs: int | None = None

    def run(self, graph_module: fx.GraphModule) -> None:
        write(GRAPH_SIGNATURE, graph_module, signature_of(graph_module, self.inputs, self.forward_outputs))
