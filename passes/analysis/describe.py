"""Pass: which inputs of a graph are parameters, which outputs their gradients."""
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.annotations import write
from passes.base import AnalysisPass
from passes.graph.interface import GraphInput, describe
from passes.graph.keys import INTERFACE
from passes.registry import register


@register
@dataclass(frozen=True)
class Describe(AnalysisPass):
    """Writes INTERFACE. inputs: those of the Dynamo graph, in order; forward_outputs: None for a forward graph."""

    name = "describe"
    provides = (INTERFACE,)

    inputs: tuple[GraphInput, ...] = ()
    forward_outputs: int | None = None

    def run(self, graph_module: fx.GraphModule) -> None:
        write(INTERFACE, graph_module, describe(graph_module, self.inputs, self.forward_outputs))
