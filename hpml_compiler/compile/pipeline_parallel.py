"""Compile one Dynamo graph for a pipeline: stages on ranks of their own, microbatch by microbatch.

Every rank traces and cuts the full graph, and compiles its own stages and the code around the microbatch loop. Where the mesh
has other axes than `pp`, the full graph is planned on these, as if one stage ran it all, and each rank's share of it is cut.
Parameters are placed on these axes. Along `pp`, a parameter that only one rank's stages read is on that rank alone, with its
gradient (`hpml_compiler.compile.program.stage_parameters`); others are on every rank, and the rank of their stage computes
their gradients and broadcasts them. A graph that is not pipelined borrows such parameters from their owners at each call.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile.cache.graph_cache import CachedGraph, GraphCache
from hpml_compiler.compile.cache.graph_cache_key import CacheInputs
from hpml_compiler.compile.cache.lazy_plan import PlanSource, joint_of
from hpml_compiler.compile.decide.pipeline_planner import PipelinePlanner
from hpml_compiler.compile.graph_compiler import GraphCompiler, Halves
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs, guard_on_rows, sizes_are_numbers
from hpml_compiler.compile.inputs.pp_mesh import PipelineMesh
from hpml_compiler.compile.program.microbatch_autograd import MakesWhole
from hpml_compiler.compile.program.pipeline_inference import forward_only
from hpml_compiler.compile.program.pipeline_program import PipelineProgram
from hpml_compiler.compile.program.pipeline_runtime import PipelineRuntime
from hpml_compiler.compile.wrapper.runtime_wrapper import backward_wrapper, runtime_wrapper
from hpml_compiler.monitor.stage_monitor import StageMonitor
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.microbatching import joint_of_loss
from hpml_compiler.planner.pipeline.stage_halves import warn_of_empty_stages, warn_without_stages
from hpml_compiler.runtime.consistency.rank_sync import when_all_succeed
from hpml_compiler.runtime.placements.single_rank_placement import owner_of
from hpml_compiler.runtime.program.microbatch_loop import Call
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from hpml_compiler.session.run_monitor import watch_of
from passes import compat
from passes.graph.graph_copy import copy_graph
from passes.pipeline.find_stages import TooFewBlocks
from passes.pipeline.stage_assignment import StageAssignment
from passes.tracing.joint_trace import JointTrace


class PipelineCompiler(GraphCompiler):
    """Compiles one graph, pipelined where it has enough blocks."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options):
        super().__init__(gm, given, options, f"graph of a pipeline, {len(session.current().graphs)}")
        self.cluster = local_cluster(options, dist.get_world_size())
        self.mesh = PipelineMesh(options.mesh or {})
        self.watched: StageMonitor | None = None

    def compile(self) -> Callable[..., Any]:
        guard_on_rows(self.gm)
        self.inputs = GraphInputs(self.gm, self.given, self.options)
        self.inputs.take_rows_whole()
        sizes_are_numbers(self.gm, examples := self.inputs.examples)
        self.planner = PipelinePlanner(self.name, self.given, self.inputs, self.options, self.mesh, self.seconds)
        self.earlier = GraphCache(self.gm, CacheInputs.of(self.inputs, self.given), self.options)
        if self.earlier.found is not None:
            self.mesh.groups()  # the restored graphs refer to these process groups by name
            self.planner.as_in(self.earlier.found.running)
        function = self.trace(examples)
        if self.program is not None:
            session.save_plan()  # again, now with the reports of regional compilation
        takes = self.planner.takes()
        self.earlier.keep(takes)
        return runtime_wrapper(self.name, function, self.gm, self.given, self.inputs, takes, self.mesh.sizes, self.holding,
                               self.watched, self.options)

    def split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        planner, traced = self.planner, JointTrace(copy_graph(joint), self.inputs.described, forward_outputs, 0.0)
        planner.training = True
        planner.together(joint)
        whole = self._whole_step(traced, forward_outputs)
        try:
            cut = planner.cut(joint_of_loss(joint), forward_outputs, whole is not None, traced)
        except TooFewBlocks as error:
            if dist.get_rank() == 0:
                warn_without_stages(self.name, error.what)
            planner.whole(joint, forward_outputs)
            self._note_held()
            return self.halves(joint, inputs, forward_outputs, static_inputs)
        assert planner.found is not None, "what is cut has stages"
        self.program = program = PipelineRuntime(self.options, cut, whole)
        unplanned = PlanSource(traced, self.options, self.cluster, times=planner.times, planned=planner.planned,
                               starts=starts_of(planner.found))
        self._note_stages(unplanned, program, planner.found)
        self.earlier.note(cut, cut.parts.saved, unplanned)
        return None

    def restore(self, restored: Any, found: CachedGraph, forward_outputs: int) -> None:
        packed, stages = found.unplanned, self.planner.found
        if not isinstance(restored, PipelineProgram):
            if dist.get_rank() == 0:
                warn_without_stages(self.name, "as in an earlier launch")
            self._note_held()
            return
        assert packed is not None and stages is not None, "of what has stages, a plan can be asked for"
        whole = self._whole_step(packed, forward_outputs)
        self.program = program = PipelineRuntime(self.options, restored, whole, shares=False)
        self._note_stages(packed, program, stages)

    def backward_of(self, call: Call, gm: GraphModule) -> Call:
        return backward_wrapper(self.name, call, gm, self.mesh.sizes, (), self.watched)

    def inference(self, gm: GraphModule) -> PipelineProgram | GraphModule:
        """Forward alone runs through the stages that own its parameters; else the ranks of each stage run the full graph."""
        planner = self.planner
        if any(owner_of(x) is not None for x in self.given) and (cut := planner.evaluation(copy_graph(gm))) is not None:
            return cut
        if self.mesh.is_split:
            planner.together(gm)
            planner.whole(gm, None)
        return gm

    def run_inference(self, graph: Any) -> Call:
        self._note_held()
        if isinstance(graph, PipelineProgram):
            return forward_only(PipelineRuntime(self.options, graph, shares=self.earlier.found is None))
        return super().run_inference(graph)

    def together(self, half: str, lower: Callable[[], Call]) -> Call:
        """Compile a half of a graph that is not pipelined, all ranks together, in its first call at the latest."""
        return when_all_succeed(f"compile {half} of the {self.name}", lower)

    def _whole_step(self, traced: JointTrace | bytes, forward_outputs: int) -> MakesWhole | None:
        """Makes the same step for gradients at all outputs; None where a stage has several ranks."""
        if self.mesh.is_split:
            return None
        return lambda: PipelineRuntime(self.options, self.planner.cut(joint_of(traced), forward_outputs, False))

    def _note_stages(self, unplanned: PlanSource | bytes, program: PipelineRuntime, found: StageAssignment) -> None:
        self._note_held()
        if dist.get_rank() == 0:
            warn_of_empty_stages(self.name, found)
        self.session.stage_starts[compat.frame_being_compiled()] = starts_of(found)
        self.plan_later(unplanned, self.cluster)
        if self.options.monitor:
            self.watched = watch_of(self.name, program.table, program.place, found, self.options)

    def _note_held(self) -> None:
        self.holding.note(self.planner.held)


def starts_of(stages: StageAssignment) -> tuple[str, ...]:
    """First block of each stage but stage 0."""
    return tuple(blocks[0] for blocks in stages.blocks[1:])
