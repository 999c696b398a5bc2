"""Dry run of a plan on a copy of the graph, for one rank: its saved activations and its memory."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, problem_of_loop
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.graph.few_layer_trace import layers_of
from hpml_compiler.planner.graph.gather_choice import GatherChoice
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.planner.graph.microbatching import loop_of, loss_of, memory_model_in_time
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.decision import MicrobatchPlacement
from passes.graph.graph_copy import copy_graph
from passes.hardware.axis import device_axes, fullest_rank
from passes.hardware.mesh import mesh_from_pin
from passes.presets import after_planning, building_storage_program
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.solver.work_limit import WorkLimit
from passes.transforms.comm.prefetch_all_gather import starts_ahead
from passes.transforms.shard.redistributor import MeshGroups

MOST_OF_THE_TIME = 0.5
"""Part of the time limit for one trial. Few come near this."""


@dataclass(frozen=True)
class DryRun:
    """times: placements on the microbatch axis; None with one microbatch. repeats: collectives of parameters that each
    microbatch repeats, where that is decided already."""

    step: StepProblem
    times: MicrobatchPlacement | None = None
    repeats: LoopGathers | None = None

    @property
    def sharing(self) -> StepContext:
        """State that the graphs of the step share."""
        assert self.step.sharing is not None, "there is a memory budget"
        return self.step.sharing

    def __call__(self, planned: PlanResult, allowance: WorkLimit | None = None) -> PlanResult:
        """Solve checkpointing for the first rank; the graphs of other ranks have the same calls. Process groups need not exist:
        none is used. With microbatches, parameters are gathered, and gradients reduced, as takes the least time together with
        recomputation. allowance: for solving; a part of the options' time limit if None."""
        within = allowance or WorkLimit(MOST_OF_THE_TIME * self.step.options.time_limit)
        if self.times is None:
            return replace(planned, checkpointing=self._solved(planned, within))
        choice, found, least_us = self._choice(planned), list[PlanResult](), math.inf
        for repeats in choice.candidates(self.sharing.budget):
            us = choice.us(repeats)
            if us < least_us:  # else recomputation cannot make up for it
                kept = replace(self, repeats=repeats)._solved(planned, within)
                found.append(replace(planned, checkpointing=kept, repeats=repeats, repeats_us=us))
                least_us = min(least_us, _more_us(found[-1]) if kept.fits else math.inf)
        fitting = [each for each in found if each.checkpointing is not None and each.checkpointing.fits]
        return min(fitting, key=_more_us) if fitting else min(found, key=_peak_bytes)

    def _choice(self, planned: PlanResult) -> GatherChoice:
        step, folded = self.step, self.step.folded
        assert self.times is not None, "there is a loop"
        record = planned.record if folded is None else folded.of_all_layers(planned.record)
        return GatherChoice(record, step.annotated, self.times, step.cluster, step.options, self.repeats, step.hurried)

    def _solved(self, planned: PlanResult, within: WorkLimit) -> CheckpointDecision:
        problem = self.problem(planned)
        if self.step.hurried and problem.is_hopeless:
            return problem.counted(())
        kept = problem.solved(self.step.options, False, within)
        if kept.fits or not starts_ahead(problem.gm.graph):
            return kept
        at_once = replace(self.problem(planned, ahead=False).solved(self.step.options, False, within), ahead=False)
        return at_once if at_once.peak_bytes < kept.peak_bytes else kept

    def obey(self, planned: PlanResult, pinned: CheckpointingPlan) -> PlanResult | None:
        """Apply the checkpointing of a saved plan; None where it does not fit, since the budget is another one."""
        kept = self.problem(planned, pinned.ahead).obeyed(pinned)
        if kept is None:
            return None
        us = 0.0 if self.times is None or self.repeats is None else self._choice(planned).us(self.repeats)
        return replace(planned, checkpointing=replace(kept, ahead=pinned.ahead), repeats=self.repeats, repeats_us=us)

    def problem(self, planned: PlanResult, ahead: bool = True) -> CheckpointProblem:
        """The rewritten graph's problem. ahead: with all-gathers that overlap the previous block, which take more memory."""
        step, gm, axes = self.step, copy_graph(self.step.annotated.gm), device_axes(planned.mesh)
        groups = MeshGroups(axes, fullest_rank(planned.decision.axes), tuple(f"trial_{axis.name}" for axis in axes))
        share, name, builder = self.sharing.share_of(self.memory(planned)), planned.record.name, self.builder(planned, groups)
        if self.times is not None:
            loop = loop_of(gm, step.annotated.graph, planned.decision, self.times, groups, step.outputs, step.kept_gradients,
                           step.options.compiler, self.repeats or ONCE, ahead, compact=True, chunks=step.options.chunks)
            return problem_of_loop(gm, loop, self.times.microbatches, builder, share, name, step.folded)
        after_planning(planned.decision, groups, step.options.compiler, step.outputs, step.kept_gradients,
                       compact=True, ahead=ahead, by_block=step.folded is not None, chunks=step.options.chunks)(gm)
        building_storage_program(builder)(gm)
        return CheckpointProblem(gm, step.outputs, share, name)

    @property
    def saved_part(self) -> float:
        """Share of the full batch's saved values that are in memory at the same time."""
        return memory_model_in_time(self.times, loss_of(self.step.annotated.gm) is not None).in_flight

    def memory(self, planned: PlanResult) -> GraphMemory:
        """Memory of this graph on a rank, besides saved activations."""
        memory, whole = planned.record.memory, self.sharing.replicated
        part = memory.gradients / whole.gradients if whole.gradients else 1.0
        return GraphMemory(whole.name, memory.parameters, memory.gradients, memory.optimizer, part * whole.largest,
                           copies=memory.copies)

    def builder(self, planned: PlanResult, groups: MeshGroups) -> BuildStorageProgram:
        step = self.step
        prices = MeshPrices(mesh_from_pin(planned.mesh, step.cluster), step.options.optimizer_states)
        return BuildStorageProgram(step.outputs, prices, step.options.compiler == "inductor", step.written, groups.axis_of,
                                   offload_price(step.options, step.cluster), step.device, *layers_of(step.folded),
                                   recompute=tuple(step.options.recompute.items()), gathers_again=step.options.zero == 3)


def _more_us(tried: PlanResult) -> float:
    """Time that a step takes longer than with everything saved, and gathered and reduced once."""
    assert tried.checkpointing is not None, "it was tried out"
    return tried.checkpointing.recompute_us + tried.checkpointing.offload_us + tried.repeats_us


def _peak_bytes(tried: PlanResult) -> int:
    assert tried.checkpointing is not None, "it was tried out"
    return tried.checkpointing.peak_bytes
