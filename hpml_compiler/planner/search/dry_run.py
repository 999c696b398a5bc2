"""Dry run of a plan on a copy of the graph, for one rank: its saved activations and its memory."""
from __future__ import annotations

from dataclasses import dataclass, replace

from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, problem_of_loop
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.graph.few_layer_trace import layers_of
from hpml_compiler.planner.graph.graph_planning import PlanResult
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.planner.graph.microbatching import loop_of, loss_of, memory_model_in_time
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.graph_copy import copy_graph
from passes.hardware.axis import device_axes
from passes.hardware.mesh import mesh_from_pin
from passes.presets import after_planning, building_storage_program
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.solver.work_limit import WorkLimit
from passes.transforms.comm.prefetch_all_gather import starts_ahead
from passes.transforms.shard.redistributor import MeshGroups

MOST_OF_THE_TIME = 0.5
"""Part of the time limit for one trial. Few come near this."""


@dataclass(frozen=True)
class DryRun:
    """times: placements on the microbatch axis; None with one microbatch."""

    step: StepProblem
    times: MicrobatchPlacement | None = None

    @property
    def sharing(self) -> StepContext:
        """State that the graphs of the step share."""
        assert self.step.sharing is not None, "there is a memory budget"
        return self.step.sharing

    def __call__(self, planned: PlanResult, allowance: WorkLimit | None = None) -> CheckpointDecision:
        """Solve checkpointing for the first rank; the graphs of other ranks have the same calls. Process groups need not exist:
        none is used. allowance: for solving; a part of the options' time limit if None."""
        problem, within = self.problem(planned), allowance or WorkLimit(MOST_OF_THE_TIME * self.step.options.time_limit)
        kept = problem.solved(self.step.options, False, within)
        if kept.fits or not starts_ahead(problem.gm.graph):
            return kept
        at_once = replace(self.problem(planned, ahead=False).solved(self.step.options, False, within), ahead=False)
        return at_once if at_once.peak_bytes < kept.peak_bytes else kept

    def obey(self, planned: PlanResult, pinned: CheckpointingPlan) -> CheckpointDecision | None:
        """Apply the checkpointing of a saved plan; None where it does not fit, since the budget is another one."""
        kept = self.problem(planned, pinned.ahead).obeyed(pinned)
        return None if kept is None else replace(kept, ahead=pinned.ahead)

    def problem(self, planned: PlanResult, ahead: bool = True) -> CheckpointProblem:
        """The rewritten graph's problem. ahead: with all-gathers that overlap the previous block, which take more memory."""
        step, gm, axes = self.step, copy_graph(self.step.annotated.gm), device_axes(planned.mesh)
        groups = MeshGroups(axes, (0,) * len(axes), tuple(f"trial_{axis.name}" for axis in axes))
        room, name, tape = self.sharing.room(self.held(planned)), planned.record.name, self.tape(planned, groups)
        if self.times is not None:
            loop = loop_of(gm, step.annotated.graph, planned.decision, self.times, groups, step.outputs, step.kept_gradients,
                           step.options.compiler)
            return problem_of_loop(gm, loop, self.times.microbatches, tape, room, name, step.folded)
        after_planning(planned.decision, groups, step.options.compiler, step.outputs, step.kept_gradients,
                       compact=True, ahead=ahead, by_block=step.folded is not None)(gm)
        building_storage_program(tape)(gm)
        return CheckpointProblem(gm, step.outputs, room, name)

    @property
    def saved_part(self) -> float:
        """Share of the full batch's saved values that are in memory at the same time."""
        return memory_model_in_time(self.times, loss_of(self.step.annotated.gm) is not None).in_flight

    def held(self, planned: PlanResult) -> GraphMemory:
        """Memory of this graph on a rank, besides saved activations."""
        memory, whole = planned.record.memory, self.sharing.whole
        part = memory.gradients / whole.gradients if whole.gradients else 1.0
        return GraphMemory(whole.name, memory.parameters, memory.gradients, memory.optimizer, part * whole.largest)

    def tape(self, planned: PlanResult, groups: MeshGroups) -> BuildStorageProgram:
        step = self.step
        prices = MeshPrices(mesh_from_pin(planned.mesh, step.cluster), step.options.optimizer_states)
        return BuildStorageProgram(step.outputs, prices, step.options.compiler == "inductor", step.written, groups.axis_of,
                                   offload_price(step.options, step.cluster), step.device, *layers_of(step.folded),
                                   recompute=tuple(step.options.recompute.items()))
