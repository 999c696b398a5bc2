"""A plan tried out on a copy of the graph, on one rank alone: what it would save for backward, and hold."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, problem_of_loop
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace, layers_of
from hpml_compiler.planner.graph.graph_planning import PlanResult
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.planner.graph.microbatching import loop_of, loss_of, memory_model_in_time
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
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.solver.work_limit import WorkLimit
from passes.transforms.comm.prefetch_all_gather import starts_ahead
from passes.transforms.shard.redistributor import MeshGroups

MOST_OF_THE_TIME = 0.5
"""Part of the time limit that one trial may take. Few come near this."""


@dataclass(frozen=True)
class DryRun:
    """kept_gradients: numbers of the outputs that `.grad` will hold. written: positions of inputs that a call changes.
    sharing: what it leaves to other graphs of the step. device: the type of what will run it, "" if that is where its tensors
    are. folded: of which deeper model the graph has a few layers. times: where it goes through its batch in microbatches."""

    annotated: AnalyzedGraph
    options: Options
    cluster: Cluster
    forward_outputs: int
    kept_gradients: Sequence[int]
    written: frozenset[int]
    sharing: StepContext
    device: str = ""
    folded: FewLayerTrace | None = None
    times: MicrobatchPlacement | None = None

    def __call__(self, planned: PlanResult, allowance: WorkLimit | None = None) -> CheckpointDecision:
        """Values that the first rank keeps for backward; the others' graphs have the same calls. Process groups need not be
        there: none is used. allowance: for deciding it; a part of the options' time limit if None."""
        problem, within = self.problem(planned), allowance or WorkLimit(MOST_OF_THE_TIME * self.options.time_limit)
        kept = problem.solved(self.options, False, within)
        if kept.fits or not starts_ahead(problem.gm.graph):
            return kept
        at_once = replace(self.problem(planned, ahead=False).solved(self.options, False, within), ahead=False)
        return at_once if at_once.peak_bytes < kept.peak_bytes else kept

    def obey(self, planned: PlanResult, pinned: CheckpointingPlan) -> CheckpointDecision | None:
        """What it keeps as a saved plan says; None where that does not fit, since the budget is another one."""
        kept = self.problem(planned, pinned.ahead).obeyed(pinned)
        return None if kept is None else replace(kept, ahead=pinned.ahead)

    def problem(self, planned: PlanResult, ahead: bool = True) -> CheckpointProblem:
        """Of the rewritten graph. ahead: with what is gathered under way while the block before computes, which holds more."""
        gm, axes = copy_graph(self.annotated.gm), device_axes(planned.mesh)
        groups = MeshGroups(axes, (0,) * len(axes), tuple(f"trial_{axis.name}" for axis in axes))
        room, name, tape = self.sharing.room(self.held(planned)), planned.record.name, self.tape(planned, groups)
        if self.times is not None:
            loop = loop_of(gm, self.annotated.graph, planned.decision, self.times, groups, self.forward_outputs,
                           self.kept_gradients, self.options.compiler)
            return problem_of_loop(gm, loop, self.times.microbatches, tape, room, name, self.folded)
        after_planning(planned.decision, groups, self.options.compiler, self.forward_outputs, self.kept_gradients,
                       compact=True, ahead=ahead, by_block=self.folded is not None)(gm)
        building_storage_program(tape)(gm)
        return CheckpointProblem(gm, self.forward_outputs, room, name)

    @property
    def saved_part(self) -> float:
        """Of the saved values of the whole batch, those that are there at a time."""
        return memory_model_in_time(self.times, loss_of(self.annotated.gm) is not None).in_flight

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
