"""Passes: signature of a loop body before it is split into stages, and stages that all ranks agreed on."""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from passes.annotations import write
from passes.base import AnalysisPass
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_signature import GraphSignature
from passes.graph.placement_graph import InputKind
from passes.graph.planning_keys import GRAPH_SIGNATURE
from passes.json_records import FrozenMap
from passes.pipeline.stage_assignment import STAGES, StageAssignment
from passes.registry import register

_NO_STAGES = StageAssignment(0, FrozenMap(), frozenset(), (), FrozenMap(), frozenset(), FrozenMap(), (), (), ())


@register
@dataclass(frozen=True)
class AnalyzeStageBody(AnalysisPass):
    """Writes INTERFACE. kinds: of the body's inputs, by name; its outputs are not gradients of these."""

    name = "analyze_stage_body"
    provides = (GRAPH_SIGNATURE,)

    kinds: FrozenMap[str, InputKind] = field(default_factory=FrozenMap)
    forward_outputs: int = 0

    def run(self, graph_module: fx.GraphModule) -> None:
        outputs = tuple((node.name, None) for node in returned_nodes(graph_module) if node is not None)
        empty = FrozenMap()
        write(GRAPH_SIGNATURE, graph_module, GraphSignature(self.kinds, empty, empty, empty, empty, outputs,
                                                            self.forward_outputs, True))


@register
@dataclass(frozen=True)
class AdoptStages(AnalysisPass):
    """Writes STAGES as found by another rank."""

    name = "adopt_stages"
    provides = (STAGES,)

    stages: StageAssignment = _NO_STAGES

    def run(self, graph_module: fx.GraphModule) -> None:
        write(STAGES, graph_module, self.stages)
