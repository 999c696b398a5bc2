"""One Dynamo graph on one device: inductor's own compile or, where a budget, microbatches or blocks are asked for, ours."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.cache.graph_cache import CachedGraph, GraphCache
from hpml_compiler.compile.cache.graph_cache_key import CacheInputs
from hpml_compiler.compile.cache.lazy_plan import CheckpointingPlanSource, MicrobatchPlanSource, unpacked
from hpml_compiler.compile.graph_compiler import GraphCompiler, Halves
from hpml_compiler.compile.inputs.graph_inputs import sizes_are_numbers
from hpml_compiler.compile.inputs.unsupported_graphs import check_supported
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.lower.inductor_cache_dir import check_cache_dir
from hpml_compiler.compile.lower.lowering import Call, boxed
from hpml_compiler.compile.program.loop_program import LoopProgram
from hpml_compiler.compile.program.microbatch_autograd import Keeps, MakesWhole, MicrobatchedStep, compile_in_microbatches
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.single_device_checkpointing import checkpoint_single_device, keep_in_loop
from hpml_compiler.planner.graph.graph_planning import solver_options
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.graph.microbatching import fitting_microbatches, joint_of_loss, microbatch_placement
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.runtime.install.unwrap_inputs import copy_for_set_data
from hpml_compiler.runtime.optimizer.optimizer_offload import offload_state, watch_steps
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from hpml_compiler.session.step_memory import step_context
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.graph.graph_signature import graph_inputs
from passes.graph.loops.loop_parts import LoopSplit
from passes.presets import annotate
from passes.presets import one_device as prepare
from passes.sharding.microbatch_axis import MicrobatchPlacement, replicated_decision
from passes.tracing.joint_trace import JointTrace
from passes.transforms.shard.redistributor import MeshGroups


def compile_single_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if options.offloads("optimizer"):
        offload_state((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), options.offload_folder or "")
        watch_steps()
    ours = options.memory_budget is not None or options.microbatches > 1 or options.compile_blocks == "on"
    if ours and torch.is_grad_enabled():
        return SingleDeviceCompiler(gm, example_inputs, options).compile()
    if options.compiler == "inductor":
        with compile_phase("compile", "compiling with inductor", {}), check_cache_dir():
            return compat.inductor_whole(gm, example_inputs, check_cache_dir)
    copy_for_set_data(gm)
    compiler = lambda graph, _: boxed(graph.forward)  # noqa: E731
    return compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(gm, example_inputs)


class SingleDeviceCompiler(GraphCompiler):
    """One graph under a budget, by which it is decided what is kept for backward; or in microbatches, where its rows allow
    them; or with equal blocks compiled once."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options):
        super().__init__(gm, given, options, "")
        self.lowering.blocks = "on" if options.compile_blocks == "on" else "off"
        self.cluster = local_cluster(options, 1)
        self.sharing: StepContext | None = None
        if options.memory_budget is not None:
            self.sharing = step_context(self.session.step, gm, given, options, self.cluster.device.memory_bytes)
            self.options = self.sharing.options
        self.takes = RuntimeMetadata()
        self.decided: CheckpointDecision | None = None

    def compile(self) -> Callable[..., Any]:
        check_supported(self.gm)
        copy_for_set_data(self.gm)
        sizes_are_numbers(self.gm, self.given)  # what is decided for one size need not fit with another
        self.described = graph_inputs(self.gm, self.given)
        shapes = [x.shape for x, its in zip(self.given, self.described, strict=True) if its.kind == "batch"]
        self.microbatches = fitting_microbatches(shapes, self.options.microbatches)
        given = CacheInputs(self.given, self.given, self.described)
        self.earlier = GraphCache(self.gm, given, self.options, self.sharing)
        call = self.trace(self.given)
        if self.program is not None:
            session.save_plan()  # which says now what was compiled in blocks
        self.earlier.keep(self.takes)
        return call

    def split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        self.takes = RuntimeMetadata(written=frozenset(compat.mutated_inputs(joint)))
        if self.microbatches > 1 and self._goes_through_microbatches(joint, forward_outputs):
            return None
        if self.sharing is not None:
            return self._within_budget(joint, self.sharing, forward_outputs)
        with self.doing("rewrite", "rewriting"):
            prepare(self.options.compiler)(joint)
            return self.halves(joint, inputs, forward_outputs, static_inputs)

    def restore(self, restored: Any, found: CachedGraph, forward_outputs: int) -> None:
        if self.sharing is not None:
            self.lowering.count_bytes()
            assert found.running.budgeted is not None, "under a budget, what is kept is decided"
            self.session.step.graphs[self.sharing.frame] = found.running.budgeted
        if isinstance(restored, LoopProgram):
            packed = found.unplanned
            assert packed is not None, "of what goes through microbatches, a plan can be asked for"
            self.program = MicrobatchedStep(self.options, restored,
                                            lambda: self._whole_step(unpacked(packed).traced, forward_outputs), shares=False)
        if found.unplanned is not None:
            self.plan_later(found.unplanned, self.cluster)

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Under a budget alone, those by which `hpml plan` traces for one device."""
        alone = self.sharing is not None and self.options.microbatches == 1
        return None if alone and not self.lowering.inductor else super().decompositions()

    def backward_of(self, call: Call, gm: GraphModule) -> Call:
        return call

    def _within_budget(self, joint: GraphModule, sharing: StepContext, forward_outputs: int) -> Halves:
        traced = JointTrace(copy_graph(joint), self.described, forward_outputs, 0.0)
        with self.doing("solve", "deciding what is kept for backward"):
            pinned = None
            if self.options.plan is not None:
                pinned = self._pinned(annotate(copy_graph(joint), self.described, forward_outputs).hash())
            kept = checkpoint_single_device(joint, forward_outputs, sharing, self.cluster, pinned)
        self.takes = replace(self.takes, budgeted=self.session.step.enter(sharing, sharing.whole, kept))
        unplanned = CheckpointingPlanSource(traced, self.options, kept)
        self.plan_later(unplanned, self.cluster)
        halves = self.lowering.cut(joint, kept, forward_outputs, self.options.offload_folder or "")
        self.note_halves(halves, unplanned)
        return halves

    def _goes_through_microbatches(self, joint: GraphModule, forward_outputs: int) -> bool:
        traced = JointTrace(copy_graph(joint), self.described, forward_outputs, 0.0)
        found = self._in_microbatches(joint_of_loss(joint), forward_outputs, lambda: self._whole_step(traced, forward_outputs))
        if found is None:
            return False
        self.program, times = found
        unplanned = MicrobatchPlanSource(traced, self.options, times, self.decided)
        self.plan_later(unplanned, self.cluster)
        self.earlier.note(found[0].cut, found[0].parts.saved, unplanned)
        return True

    def _whole_step(self, traced: JointTrace, forward_outputs: int) -> MicrobatchedStep | None:
        """The same for gradients at all outputs."""
        found = self._in_microbatches(copy_graph(traced.gm), forward_outputs, None)
        return found and found[0]

    def _in_microbatches(self, gm: GraphModule, forward_outputs: int, whole: MakesWhole | None,
                         ) -> tuple[MicrobatchedStep, MicrobatchPlacement] | None:
        with self.doing("annotate", "annotating"):
            annotated = annotate(gm, self.described, forward_outputs, self.microbatches)
        with self.doing("solve", "deciding what goes through microbatches"):
            times = microbatch_placement(annotated.graph, self.microbatches, solver_options(self.options))
        if times is None:
            return None
        gradients = range(forward_outputs, len(returned_nodes(gm)))
        keep = None if self.sharing is None else self._keep(annotated, self.sharing, forward_outputs, whole is not None)
        with self.doing("rewrite", "rewriting"):
            return compile_in_microbatches(gm, annotated, replicated_decision(annotated.graph), times, MeshGroups((), (), ()),
                                           self.options,
                                           forward_outputs, gradients, whole, keep=keep), times

    def _keep(self, annotated: AnalyzedGraph, sharing: StepContext, forward_outputs: int, first: bool) -> Keeps:
        """Decides what the loop's body saves. first: else gradients have arrived at other outputs, which comes too late to be
        refused."""
        graph_hash = annotated.hash() if first else ""

        def keep(marked: GraphModule, loop: LoopSplit) -> CheckpointDecision:
            pinned = self._pinned(graph_hash) if first else None
            kept = keep_in_loop(marked, loop, self.microbatches, forward_outputs, sharing, self.cluster, pinned, strict=first)
            if first:
                self.decided = kept
                self.takes = replace(self.takes, budgeted=self.session.step.enter(sharing, sharing.whole, kept))
            return kept

        return keep

    def _pinned(self, graph_hash: str) -> CheckpointingPlan | None:
        """What a plan for one device saves, where there is one."""
        given = self.options.load_plan()
        if given is None or given.world_size != 1 or not any(graph.kept for graph in given.graphs):
            return None
        return given.check(graph_hash, torch.__version__, 1).kept
