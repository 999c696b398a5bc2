"""Plan that is made on demand: for one device under a memory budget, for microbatches, or for the stages of a pipeline.

Compiling such a graph takes no full plan: one device needs no placements, and a stage is planned by itself. The plan is for
people who read or reuse it, so it is made later, in this launch or in the next, from a copy of the traced graph.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.step_decision import StepDecision, with_chunks
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import BlocksReport, GraphPlan
from passes import compat
from passes.graph.graph_copy import copy_graph
from passes.hardware.cluster import Cluster
from passes.serialization.serialized_graph import unpack
from passes.tracing.joint_trace import JointTrace
from passes.transforms.loss_chunks.chunk_notes import noting_chunks


@dataclass(frozen=True)
class PlanSource:
    """A graph as it was traced, before any pass, and the decisions about it. It is plain data, and its graph is not changed.

    options: with the budget in bytes. cluster: of all ranks. planned: the plan of the ranks that share a stage, where there are
    several. sharing: under a memory budget, what the graphs of its step share.
    """

    traced: JointTrace
    options: Options
    cluster: Cluster
    decision: StepDecision
    planned: PlanResult | None = None
    sharing: StepContext | None = None

    def plan(self, name: str) -> GraphPlan:
        """The plan, without this process's compile times and block reports; see `LazyPlan`."""
        # Here: a launch that takes the graph from the graph cache, and whose plan nobody asks for, plans nothing.
        from hpml_compiler.planner.checkpointing.single_device_checkpointing import plan_single_device
        from hpml_compiler.planner.graph.graph_planning import plan_graph
        from hpml_compiler.planner.graph.microbatch_estimate import in_time
        from hpml_compiler.planner.graph.microbatching import joint_of_loss
        from hpml_compiler.planner.graph.step_problem import StepProblem
        from hpml_compiler.planner.pipeline.cut_plan import CutPlan
        from passes.presets import annotate
        from passes.solver.work_limit import WorkLimit

        traced, times, kept = self.traced, self.decision.microbatches, self.decision.checkpointing
        in_stages = self.decision.stages is not None
        joint = joint_of_loss(traced.gm) if in_stages or times is not None else copy_graph(traced.gm)
        annotated = annotate(joint, traced.inputs, traced.forward_outputs, self.decision.microbatch_count,
                             self.options.shards_outputs, self.options.compiler)
        if in_stages:
            step = StepProblem(name, lambda: annotated, traced.forward_outputs, self.options, self.cluster,
                               WorkLimit(self.options.time_limit), traced=traced, sharing=self.sharing,
                               written=frozenset(compat.mutated_inputs(traced.gm)))
            decision = self.decision
            cut = CutPlan(step, times, decision.stage_starts, decision.stage_checkpointing, decision.gathers)
            with noting_chunks() as notes:
                record = cut(self.planned)
            return with_chunks(record, notes[-1] if notes else None)
        options = self.options.model_copy(update={"mesh": None})
        if kept is not None:
            record = plan_single_device(annotated, kept, options, self.cluster, name, times=times).record
            return with_chunks(record, self.decision.loss_chunks)
        record = plan_graph(annotated, options, self.cluster, name=name).record
        return with_chunks(in_time(record, annotated, times, self.cluster, options), self.decision.loss_chunks)


@dataclass
class LazyPlan:
    """Makes a plan when called. what: the source, or the source packed, from the graph cache. seconds, blocks: compile time by
    phase, and reports of regional compilation, which are filled in while the graph is compiled."""

    what: PlanSource | bytes
    seconds: Mapping[str, float]
    blocks: Mapping[str, BlocksReport] = field(default_factory=dict)
    frame: str = field(default_factory=compat.frame_being_compiled)

    def __call__(self, name: str) -> GraphPlan:
        record = unpacked(self.what).plan(name)
        return record.model_copy(update={"frame": self.frame, "blocks": self.blocks, "seconds": self.seconds})


def joint_of(traced: JointTrace | bytes) -> GraphModule:
    """A copy of a graph as it was traced. traced: the trace, or its `PlanSource`, packed."""
    return copy_graph((unpacked(traced).traced if isinstance(traced, bytes) else traced).gm)


def unpacked(what: PlanSource | bytes) -> PlanSource:
    if isinstance(what, PlanSource):
        return what
    with compat.outside_tracing(), torch.no_grad():
        return unpack(what, compat.tracing_fake_mode(), PlanSource)
