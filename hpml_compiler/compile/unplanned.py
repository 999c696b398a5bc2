"""The plan of a graph that one device runs under a byte budget, or in microbatches: made when somebody asks for it.

What was decided was decided on the graph itself, which needs no placements. The plan is for people, and for those who play it;
so it is made from a copy of the graph as it was traced, later.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import GraphModule

from hpml_compiler.compile.local import local_cluster
from hpml_compiler.options import Options
from hpml_compiler.planning.in_microbatches import with_microbatches
from hpml_compiler.planning.microbatches import loss_of
from hpml_compiler.planning.one_device import plan_of_one_device
from hpml_compiler.planning.plan_graph import plan_graph
from hpml_compiler.plans.schema import BlocksReport, GraphPlan
from passes import compat
from passes.graph.copied import copied
from passes.graph.interface import GraphInput
from passes.keeping.keys import KeptNodes
from passes.machine.mesh import mesh_from_pin
from passes.partition.in_time import InTime
from passes.presets import annotate


class Unplanned:
    """A graph as it was traced, before any pass, what was decided of it, and where the time of its compilation went."""

    def __init__(self, joint: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int, options: Options):
        self.joint = copied(joint)
        self.inputs, self.forward_outputs, self.options = inputs, forward_outputs, options
        self.frame = compat.frame_being_compiled()
        self.kept: KeptNodes | None = None
        self.seconds: dict[str, float] = {}

    def hash(self) -> str:
        return annotate(copied(self.joint), self.inputs, self.forward_outputs).hash()

    def plan(self, name: str) -> GraphPlan:
        assert self.kept is not None, "deciding comes first"
        annotated = annotate(self.joint, self.inputs, self.forward_outputs)
        options = self.options.model_copy(update={"mesh": None})
        record = plan_of_one_device(annotated, self.kept, options, local_cluster(options, 1), name).record
        return record.model_copy(update={"frame": self.frame, "seconds": self.seconds})


class UnplannedInTime:
    """A graph as it was when it was decided that it goes through its batch in microbatches, and how it does. blocks: what is
    compiled in blocks, and seconds: where the time of its compilation went, which fill themselves meanwhile."""

    def __init__(self, joint: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int, options: Options, times: InTime,
                 blocks: Mapping[str, BlocksReport], seconds: Mapping[str, float]):
        self.joint, self.times, self.blocks, self.seconds = joint, times, blocks, seconds
        self.inputs, self.forward_outputs, self.options = inputs, forward_outputs, options
        self.frame = compat.frame_being_compiled()

    def plan(self, name: str) -> GraphPlan:
        annotated = annotate(self.joint, self.inputs, self.forward_outputs, self.times.microbatches)
        options = self.options.model_copy(update={"mesh": None})
        cluster = local_cluster(options, 1)
        planned = plan_graph(annotated, options, cluster, name=name)
        record = with_microbatches(planned.record, annotated.graph, self.times, loss_of(self.joint) is not None,
                                   mesh_from_pin(planned.mesh, cluster), options.optimizer_states)
        return record.model_copy(update={"frame": self.frame, "blocks": self.blocks, "seconds": self.seconds})
