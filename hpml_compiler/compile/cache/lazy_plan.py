"""The plan of a graph that one device runs under a byte budget, or in microbatches, or ranks in stages: made when it is asked
for.

What was decided was decided on the graph itself, which needs no placements, or of one stage alone. The plan is for people, and
for those who play it; so it is made from a copy of the graph as it was traced, later, in this launch or in the next.
"""
from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.single_device_checkpointing import plan_single_device
from hpml_compiler.planner.graph.graph_planning import PlanResult, plan_graph
from hpml_compiler.planner.graph.microbatch_estimate import in_time
from hpml_compiler.planner.graph.microbatching import joint_of_loss
from hpml_compiler.planner.pipeline.offline_pipeline import CutPlan
from hpml_compiler.plans.schema import BlocksReport, GraphPlan
from hpml_compiler.session.run_cluster import local_cluster
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.graph_copy import copy_graph
from passes.hardware.cluster import Cluster
from passes.presets import annotate
from passes.serialization.serialized_graph import unpack
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.tracing.joint_trace import JointTrace


@dataclass(frozen=True)
class PlanSource(abc.ABC):
    """A graph as it was traced, before any pass, and what was decided of it. Data alone, and nobody changes the graph."""

    traced: JointTrace
    options: Options

    @abc.abstractmethod
    def plan(self, name: str) -> GraphPlan:
        """Without what this process knows of it; see `LazyPlan`."""


@dataclass(frozen=True)
class CheckpointingPlanSource(PlanSource):
    """On one device, with what is kept for backward. options: with the budget in bytes."""

    kept: CheckpointDecision

    def plan(self, name: str) -> GraphPlan:
        annotated = annotate(copy_graph(self.traced.gm), self.traced.inputs, self.traced.forward_outputs)
        options = self.options.model_copy(update={"mesh": None})
        return plan_single_device(annotated, self.kept, options, local_cluster(options, 1), name).record


@dataclass(frozen=True)
class MicrobatchPlanSource(PlanSource):
    """On one device, in microbatches. kept: under a budget, what each of them saves."""

    times: MicrobatchPlacement
    kept: CheckpointDecision | None = None

    def plan(self, name: str) -> GraphPlan:
        joint = joint_of_loss(self.traced.gm)
        annotated = annotate(joint, self.traced.inputs, self.traced.forward_outputs, self.times.microbatches)
        options = self.options.model_copy(update={"mesh": None})
        cluster = local_cluster(options, 1)
        if self.kept is not None:
            return plan_single_device(annotated, self.kept, options, cluster, name, times=self.times).record
        return in_time(plan_graph(annotated, options, cluster, name=name).record, annotated, self.times, cluster, options)


@dataclass(frozen=True)
class PipelinePlanSource(PlanSource):
    """Through stages. times: where everything is on the axis of time, None where the whole batch is one microbatch. cluster: of
    all ranks. planned: what the ranks of a stage do, where there are several. starts: the block that each stage but the first
    begins with."""

    cluster: Cluster
    times: MicrobatchPlacement | None
    planned: PlanResult | None
    starts: tuple[str, ...]

    def plan(self, name: str) -> GraphPlan:
        return CutPlan(self.traced, self.options, self.cluster, self.times, name, starts=self.starts)(self.planned)


PLAN_SOURCES = (CheckpointingPlanSource, MicrobatchPlanSource, PipelinePlanSource)


@dataclass
class LazyPlan:
    """Makes a plan when it is asked for. what: also packed, as an earlier launch left it. seconds, blocks: where the time of
    its compilation went, and what was compiled in blocks, which fill themselves meanwhile."""

    what: PlanSource | bytes
    seconds: Mapping[str, float]
    blocks: Mapping[str, BlocksReport] = field(default_factory=dict)
    frame: str = field(default_factory=compat.frame_being_compiled)

    def __call__(self, name: str) -> GraphPlan:
        record = unpacked(self.what).plan(name)
        return record.model_copy(update={"frame": self.frame, "blocks": self.blocks, "seconds": self.seconds})


def unpacked(what: PlanSource | bytes) -> PlanSource:
    if isinstance(what, PlanSource):
        return what
    with compat.outside_tracing(), torch.no_grad():
        return unpack(what, compat.tracing_fake_mode(), *PLAN_SOURCES)
