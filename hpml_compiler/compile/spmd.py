"""Compile one Dynamo graph for one rank or several: trace the joint graph, decide, rewrite, lower, place parameters.

Several ranks agree on a plan, with placements of every value, before anything is rewritten. One rank is a mesh without axes:
nothing is placed, so the remaining decisions (microbatches, activation checkpointing) are made on the graph as it was traced,
and its plan is made on demand.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile.cache.graph_cache import CachedGraph, GraphCache
from hpml_compiler.compile.cache.graph_cache_key import CacheInputs
from hpml_compiler.compile.cache.lazy_plan import PlanSource, joint_of
from hpml_compiler.compile.decide.rank_checkpointing import RankCheckpointing
from hpml_compiler.compile.decide.rank_planner import RankPlanner, enter_plan, say_plan, say_what_is_whole
from hpml_compiler.compile.decide.rewrite import rewrite_for_rank
from hpml_compiler.compile.graph_compiler import GraphCompiler, Halves
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs, guard_on_rows, sizes_are_numbers
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.lower.lowering import Call
from hpml_compiler.compile.program.loop_program import LoopProgram
from hpml_compiler.compile.program.microbatch_autograd import (
    Keeps,
    MakesWhole,
    MicrobatchedStep,
    compile_in_microbatches,
    microbatch_count,
)
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata, held_by
from hpml_compiler.compile.wrapper.runtime_wrapper import backward_wrapper, runtime_wrapper
from hpml_compiler.monitor.hooks import WatchedGraph
from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import with_checkpointing
from hpml_compiler.planner.graph.graph_planning import PlanResult, solver_options
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.planner.graph.microbatch_estimate import in_time
from hpml_compiler.planner.graph.microbatching import joint_of_loss, loss_of, memory_model_in_time, microbatch_placement
from hpml_compiler.planner.search.fitting_search import FittingSearch
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.runtime.consistency.input_check import draws_random_numbers
from hpml_compiler.runtime.consistency.rank_sync import CompiledTogether, from_rank_0, same_graph
from hpml_compiler.runtime.process.world_group import world_size
from hpml_compiler.runtime.watchdog.barrier_check import CALLING, require_all_ranks
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from hpml_compiler.session.run_monitor import monitor_of
from hpml_compiler.session.step_memory import step_context
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.graph_copy import copy_graph
from passes.presets import one_device
from passes.sharding.microbatch_axis import MicrobatchPlacement, replicated_decision
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace


class SpmdCompiler(GraphCompiler):
    """Compiles one graph, sharded over all ranks, or in full on one."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options):
        current = session.current()
        super().__init__(gm, given, options, f"graph_{len(current.graphs) + len(current.unplanned)}")
        self.alone, self.cluster = world_size() == 1, local_cluster(options, world_size())
        self.sharing: StepContext | None = None
        if options.memory_budget is not None:
            self.sharing = step_context(self.session.step, gm, given, options, self.cluster.device.memory_bytes)
            self.options = self.sharing.options
        self.checkpointing = self.sharing and RankCheckpointing(self.sharing, self.cluster, self._keep)
        self.all_ranks = CompiledTogether(self.name)
        self.takes = RuntimeMetadata()
        self.watched: WatchedGraph | None = None
        # decisions
        self.traced: JointTrace | None = None
        self.allowance: WorkLimit | None = None
        self.planned: PlanResult | None = None
        self.times: MicrobatchPlacement | None = None
        self.kept: CheckpointDecision | None = None
        self.record: GraphPlan | None = None  # None on one rank

    def compile(self) -> Callable[..., Any]:
        guard_on_rows(self.gm)
        self.inputs = GraphInputs(self.gm, self.given, self.options)
        sizes_are_numbers(self.gm, self.inputs.examples)
        self.microbatches = microbatch_count(self.inputs, self.options)
        self.earlier = GraphCache(self.gm, CacheInputs.of(self.inputs, self.given), self.options, self.sharing)
        planned_before = len(self.session.graphs)
        if self.earlier.found is not None:
            self.all_ranks.agreed = True
            self._as_in(self.earlier.found.running)
        try:
            function = self.all_ranks.whole(lambda: self.trace(self.inputs.examples))
        except Exception:
            del self.session.graphs[planned_before:]  # all ranks drop plans of graphs that failed, and may compile them again
            raise
        takes = self._metadata()
        if self.record is not None:
            self.record.blocks.update((self.lowering if self.program is None else self.program).reports)
        if self.record is not None or self.program is not None:
            session.save_plan()  # again, now with the reports of regional compilation
        self.earlier.keep(takes)
        return runtime_wrapper(self.name, function, self.gm, self.given, self.inputs, takes, self.axes, self.holding,
                               self.watched, self.options)

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the graph's mesh, once it is planned; none on one rank."""
        return {} if self.record is None else dict(self.record.mesh)

    def _as_in(self, earlier: RuntimeMetadata) -> None:
        """Restore the decisions of an earlier launch, as if they had just been made."""
        self.takes, entry = earlier, earlier.entry
        self.inputs.gathered, self.inputs.written = set(earlier.gathered), set(earlier.written)
        self.holding.note(earlier.held)
        if self.sharing is not None and earlier.budgeted is not None:
            self.session.step.graphs[self.sharing.frame] = earlier.budgeted
        if entry is None:
            return
        self.session.groups(entry.record.mesh)  # the halves refer to these process groups by name
        record = entry.record.model_copy(update={"seconds": {}, "frame": compat.frame_being_compiled()})
        self._enter(record, entry.cluster, entry.rejected, earlier.training)
        if dist.get_rank() == 0:
            self.session.decided.setdefault(entry.structure, record)
            say_what_is_whole(entry.unruled)
        self._finish()

    # -- callbacks of AOTAutograd --------------------------------------------------------------------------------------

    def split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        if self.alone and (self.sharing is not None or self.microbatches > 1):
            self.traced = JointTrace(copy_graph(joint), [*self.inputs.described], forward_outputs, 0.0)
        if self.microbatches > 1:
            whole = self._whole_step(self.traced, forward_outputs)
            self.program = runs = self._in_microbatches(joint_of_loss(joint), forward_outputs, whole)
            if runs is not None:
                self.earlier.note(runs.cut, runs.parts.saved, self._finish())
                return None
        self._rewrite(joint, forward_outputs)
        unplanned = self._finish()
        halves = self.lowering.partition(joint, inputs, forward_outputs, static_inputs) if self.kept is None else (
            self.lowering.cut(joint, self.kept, forward_outputs, self.options.offload_folder or ""))
        self.note_halves(halves, unplanned)
        return halves

    def restore(self, restored: Any, found: CachedGraph, forward_outputs: int) -> None:
        packed = found.unplanned
        if found.running.budgeted is not None:
            self.lowering.count_bytes()
        if isinstance(restored, LoopProgram):
            whole = self._whole_step(packed, forward_outputs)
            self.program = MicrobatchedStep(self.options, restored, whole, self.lowering.step_us, shares=False)
        if packed is not None:
            self.plan_later(packed, self.cluster)

    def inference(self, gm: GraphModule) -> GraphModule:
        self._rewrite(gm, None)
        self._finish()
        return gm

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Decompositions for tracing; on one rank under a budget and without microbatches, those of `hpml plan`."""
        whole = self.alone and self.sharing is not None and self.options.microbatches == 1
        return None if whole and not self.lowering.inductor else super().decompositions()

    def together(self, half: str, lower: Callable[[], Call]) -> Call:
        if half == "forward":
            compat.expect_gradients({tangent.number: tangent.part for tangent in self.takes.tangents})
            return lower()
        return self.all_ranks.backward(lower)

    def backward_of(self, call: Call, gm: GraphModule) -> Call:
        in_parts = {tangent.name for tangent in self.takes.tangents}
        return backward_wrapper(self.name, call, gm, self.axes, in_parts, self.watched)

    # -- decisions and rewrites ----------------------------------------------------------------------------------------

    def _in_microbatches(self, gm: GraphModule, forward_outputs: int, whole: MakesWhole | None) -> MicrobatchedStep | None:
        """Turn `gm` into a step that runs microbatch by microbatch; None where that is not possible. whole: see
        `MicrobatchedStep`."""
        annotated = self._annotated(gm, forward_outputs, self.microbatches)
        self.allowance = within = WorkLimit(self.options.time_limit)
        with self.doing("solve", "deciding what goes through microbatches"):
            self.times = times = from_rank_0(
                lambda: microbatch_placement(annotated.graph, self.microbatches, solver_options(self.options), within))
        if times is None:
            return None
        decision = self._placed_in_time(annotated, forward_outputs, times)
        keep = self._keep_in_loop(annotated, forward_outputs, whole is not None)
        with self.doing("rewrite", "rewriting"):
            runs = compile_in_microbatches(
                gm, annotated, decision, times, self.session.groups(self.axes), self.options, forward_outputs,
                self.inputs.kept_gradients(annotated, forward_outputs), whole, self.lowering.step_us, keep)
        if self.planned is not None:
            say_plan(self.planned, annotated.graph.unruled)
        return runs

    def _placed_in_time(self, annotated: AnalyzedGraph, forward_outputs: int, times: MicrobatchPlacement) -> Decision:
        """Placements on devices of a graph with microbatches."""
        if self.alone:
            return replicated_decision(annotated.graph)
        finish = lambda planned: in_time(planned.record, annotated, times, self.cluster, self.options)  # noqa: E731
        fitting = FittingSearch(self.options, self.cluster, finish,
                                memory_model_in_time(times, loss_of(annotated.gm) is not None))
        return self._plan(annotated, forward_outputs, fitting).decision

    def _keep_in_loop(self, annotated: AnalyzedGraph, forward_outputs: int, first: bool) -> Keeps | None:
        """Checkpointing of the loop body; None without a budget. first: False for the step with gradients at other outputs."""
        if self.checkpointing is None or self.sharing is None:
            return None
        if self.planned is not None:
            return self.checkpointing.in_loop_as_planned(self.planned, self.planner.trial(self.sharing))
        return self.checkpointing.in_loop(annotated, self.microbatches, forward_outputs, first)

    def _whole_step(self, traced: JointTrace | bytes | None, forward_outputs: int) -> MakesWhole | None:
        """Makes the same step for gradients at all outputs; None on several ranks. traced: the trace, or its packed plan."""
        return None if traced is None else lambda: self._in_microbatches(joint_of(traced), forward_outputs, None)

    def _rewrite(self, gm: GraphModule, forward_outputs: int | None) -> None:
        """Turn a traced graph into this rank's program; under a budget, with activation checkpointing."""
        if self.alone:
            self._rewrite_whole(gm, forward_outputs)
            return
        annotated = self._annotated(gm, forward_outputs)
        planned = self._plan(annotated, forward_outputs)
        with self.doing("rewrite", "rewriting"):
            self.takes = rewrite_for_rank(annotated, planned, self.inputs, self.options, forward_outputs, self.takes)
        say_plan(planned, annotated.graph.unruled)
        if self.sharing is not None and self.checkpointing is not None and forward_outputs is not None:
            self.checkpointing.of_plan(gm, planned, self.planner.trial(self.sharing))

    def _rewrite_whole(self, gm: GraphModule, forward_outputs: int | None) -> None:
        self.inputs.written = compat.mutated_inputs(gm)
        if forward_outputs is None:
            return
        if self.checkpointing is None or self.traced is None:
            with self.doing("rewrite", "rewriting"):
                one_device(self.options.compiler)(gm)
            return
        with self.doing("solve", "deciding what is kept for backward"):
            self.checkpointing.of_trace(gm, self.traced)

    def _keep(self, held: GraphMemory, kept: CheckpointDecision) -> None:
        """Enter the saved activations in the step. held: other memory of the graph on a rank."""
        assert self.sharing is not None, "without a budget nothing is decided of it"
        self.kept = kept
        self.takes = replace(self.takes, budgeted=self.session.step.enter(self.sharing, held, kept))

    def _annotated(self, gm: GraphModule, forward_outputs: int | None, microbatches: int = 1) -> AnalyzedGraph:
        """The graph, analyzed for planning, after a check that all ranks have the same graph."""
        with self.doing("annotate", "annotating"):
            annotated = self.inputs.annotate(gm, forward_outputs, microbatches)
        with compat.outside_tracing():
            require_all_ranks("compiling a graph", CALLING, every=0)
        same_graph(annotated.text)
        self.takes = replace(self.takes, draws=draws_random_numbers(gm))
        return annotated

    def _plan(self, annotated: AnalyzedGraph, forward_outputs: int | None, fitting: FittingSearch | None = None) -> PlanResult:
        """Plan the graph, the same on all ranks, and enter the plan in the session. fitting: see `RankPlanner`."""
        self.annotated = annotated
        self.planner = RankPlanner(annotated, self.inputs, self.options, self.sharing, forward_outputs, fitting=fitting,
                                   allowance=self.allowance, times=self.times)
        with compile_phase("plan", f"{self.name}: planning", {}):  # the plan has the times of looking and solving
            self.planned = planned = self.planner.agreed()
        self.holding.note(held_by(annotated, planned.decision))
        self._enter(planned.record, planned.cluster, planned.rejected, annotated.interface.training)
        self.session.device_mesh(planned.mesh)  # the last collective setup that all ranks meet for
        self.all_ranks.agreed = True
        return planned

    def _enter(self, record: GraphPlan, cluster: str, rejected: Iterable[MeshAttempt], training: bool) -> None:
        self.record, self.lowering.step_us = record, record.predicted.step_time_us
        self.seconds = enter_plan(record, self.options, cluster, rejected, training, self.seconds)

    def _finish(self) -> PlanSource | None:
        """Complete the graph's record. Returns the source of a plan that is made on demand, or None."""
        if self.alone and self.traced is not None and (self.kept is not None or self.times is not None):
            unplanned = PlanSource(self.traced, self.options, self.cluster, self.kept, self.times)
            self.plan_later(unplanned, self.cluster)
            return unplanned
        if self.record is None:
            return None
        if self.planned is not None and self.kept is not None:
            self.planned = replace(self.planned, record=with_checkpointing(self.planned.record, self.kept, self.options))
            self.record = self.session.graphs[-1] = self.planned.record
        if self.options.monitor:
            self.watched = WatchedGraph(monitor_of(self.options), self.record)
        session.save_plan()
        return None

    def _metadata(self) -> RuntimeMetadata:
        """Metadata for the runtime wrapper, once the graph is compiled."""
        takes = replace(self.takes, gathered=frozenset(self.inputs.gathered), written=frozenset(self.inputs.written))
        return takes if self.planned is None else takes.of_plan(self.annotated, self.planned, self.planner.structure)
