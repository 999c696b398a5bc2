"""A plan tried out on a copy of the graph, on one rank alone: what would be kept for backward, and held."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import apply_checkpointing_plan, choose_checkpointing
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace, layers_of
from hpml_compiler.planner.graph.graph_planning import PlanResult
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_copy import copy_graph
from passes.hardware.axis import device_axes
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.presets import after_planning, building_storage_program
from passes.solver.work_limit import WorkLimit
from passes.transforms.comm.prefetch_all_gather import starts_ahead
from passes.transforms.shard.redistributor import MeshGroups

MOST_OF_THE_TIME = 0.5
"""Part of the time limit that one trial may take. Few come near this."""


@dataclass(frozen=True)
class DryRun:
    """kept_gradients: numbers of the outputs that `.grad` will hold. written: positions of inputs that a call changes.
    sharing: what it leaves to other graphs of the step. device: the type of what will run it, "" if that is where its tensors
    are. folded: of which deeper model the graph has a few layers."""

    annotated: AnalyzedGraph
    options: Options
    cluster: Cluster
    forward_outputs: int
    kept_gradients: Sequence[int]
    written: frozenset[int]
    sharing: StepContext
    device: str = ""
    folded: FewLayerTrace | None = None

    def __call__(self, planned: PlanResult, allowance: WorkLimit | None = None) -> CheckpointDecision:
        """Values that the first rank keeps for backward; the others' graphs have the same calls. Process groups need not be
        there: none is used. allowance: for deciding it; a part of the options' time limit if None."""
        gm, within = self.rewritten(planned), allowance or WorkLimit(MOST_OF_THE_TIME * self.options.time_limit)
        kept = self._kept(gm, planned, within)
        if kept.fits or not starts_ahead(gm.graph):
            return kept
        at_once = replace(self._kept(self.rewritten(planned, ahead=False), planned, within), ahead=False)
        return at_once if at_once.peak_bytes < kept.peak_bytes else kept

    def _kept(self, gm: GraphModule, planned: PlanResult, allowance: WorkLimit) -> CheckpointDecision:
        return choose_checkpointing(gm, self.forward_outputs, self.sharing.room(self.held(planned)), self.options,
                                    planned.record.name,
                                    strict=False, allowance=allowance)

    def obey(self, planned: PlanResult, pinned: CheckpointingPlan) -> CheckpointDecision | None:
        """What it keeps as a saved plan says; None where that does not fit, since the budget is another one."""
        gm = self.rewritten(planned, pinned.ahead)
        kept = apply_checkpointing_plan(gm, self.sharing.room(self.held(planned)), pinned, planned.record.name)
        return None if kept is None else replace(kept, ahead=pinned.ahead)

    def rewritten(self, planned: PlanResult, ahead: bool = True) -> GraphModule:
        """With its tape. ahead: with what is gathered under way while the block before computes, which holds more."""
        gm, axes = copy_graph(self.annotated.gm), device_axes(planned.mesh)
        groups = MeshGroups(axes, (0,) * len(axes), tuple(f"trial_{axis.name}" for axis in axes))
        after_planning(planned.decision, groups, self.options.compiler, self.forward_outputs, self.kept_gradients,
                       compact=True, ahead=ahead, by_block=self.folded is not None)(gm)
        building_storage_program(self.tape(planned, groups))(gm)
        return gm

    def held(self, planned: PlanResult) -> GraphMemory:
        """By this graph on a rank, besides what it keeps."""
        memory, whole = planned.record.memory, self.sharing.whole
        part = memory.gradients / whole.gradients if whole.gradients else 1.0
        return GraphMemory(whole.name, memory.parameters, memory.gradients, memory.optimizer, part * whole.largest)

    def tape(self, planned: PlanResult, groups: MeshGroups) -> BuildStorageProgram:
        prices = MeshPrices(mesh_from_pin(planned.mesh, self.cluster), self.options.optimizer_states)
        return BuildStorageProgram(self.forward_outputs, prices, self.options.compiler == "inductor", self.written,
                                   groups.axis_of,
                                   offload_price(self.options, self.cluster), self.device, *layers_of(self.folded))
