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

from hpml_compiler.compile.local import local_cluster
from hpml_compiler.options import Options
from hpml_compiler.planning.in_microbatches import with_microbatches
from hpml_compiler.planning.in_stages import AsCut
from hpml_compiler.planning.microbatches import loss_alone, loss_of
from hpml_compiler.planning.one_device import plan_of_one_device
from hpml_compiler.planning.plan_graph import Planned, plan_graph
from hpml_compiler.plans.schema import BlocksReport, GraphPlan
from passes import compat
from passes.graph.copied import copied
from passes.graph.packed_graph import unpack
from passes.keeping.keys import KeptNodes
from passes.machine.cluster import Cluster
from passes.machine.mesh import mesh_from_pin
from passes.partition.in_time import InTime
from passes.presets import annotate
from passes.tracing.trace import Traced


@dataclass(frozen=True)
class Unplanned(abc.ABC):
    """A graph as it was traced, before any pass, and what was decided of it. Data alone, and nobody changes the graph."""

    traced: Traced
    options: Options

    @abc.abstractmethod
    def plan(self, name: str) -> GraphPlan:
        """Without what this process knows of it; see `Later`."""


@dataclass(frozen=True)
class UnplannedKept(Unplanned):
    """On one device, with what is kept for backward. options: with the budget in bytes."""

    kept: KeptNodes

    def plan(self, name: str) -> GraphPlan:
        annotated = annotate(copied(self.traced.gm), self.traced.inputs, self.traced.forward_outputs)
        options = self.options.model_copy(update={"mesh": None})
        return plan_of_one_device(annotated, self.kept, options, local_cluster(options, 1), name).record


@dataclass(frozen=True)
class UnplannedInTime(Unplanned):
    """On one device, in microbatches."""

    times: InTime

    def plan(self, name: str) -> GraphPlan:
        joint = loss_alone(self.traced.gm)
        annotated = annotate(joint, self.traced.inputs, self.traced.forward_outputs, self.times.microbatches)
        options = self.options.model_copy(update={"mesh": None})
        cluster = local_cluster(options, 1)
        planned = plan_graph(annotated, options, cluster, name=name)
        return with_microbatches(planned.record, annotated.graph, self.times, loss_of(joint) is not None,
                                 mesh_from_pin(planned.mesh, cluster), options.optimizer_states)


@dataclass(frozen=True)
class UnplannedInStages(Unplanned):
    """Through stages. times: where everything is on the axis of time, None where the whole batch is one microbatch. cluster: of
    all ranks. planned: what the ranks of a stage do, where there are several. starts: the block that each stage but the first
    begins with."""

    cluster: Cluster
    times: InTime | None
    planned: Planned | None
    starts: tuple[str, ...]

    def plan(self, name: str) -> GraphPlan:
        return AsCut(self.traced, self.options, self.cluster, self.times, name, starts=self.starts)(self.planned)


UNPLANNED = (UnplannedKept, UnplannedInTime, UnplannedInStages)


@dataclass
class Later:
    """Makes a plan when it is asked for. what: also packed, as an earlier launch left it. seconds, blocks: where the time of
    its compilation went, and what was compiled in blocks, which fill themselves meanwhile."""

    what: Unplanned | bytes
    seconds: Mapping[str, float]
    blocks: Mapping[str, BlocksReport] = field(default_factory=dict)
    frame: str = field(default_factory=compat.frame_being_compiled)

    def __call__(self, name: str) -> GraphPlan:
        record = unpacked(self.what).plan(name)
        return record.model_copy(update={"frame": self.frame, "blocks": self.blocks, "seconds": self.seconds})


def unpacked(what: Unplanned | bytes) -> Unplanned:
    if isinstance(what, Unplanned):
        return what
    with compat.outside_tracing(), torch.no_grad():
        return unpack(what, compat.tracing_fake_mode(), *UNPLANNED)
