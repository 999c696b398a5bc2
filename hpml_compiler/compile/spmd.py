"""Compile one Dynamo graph for N ranks: trace the joint graph, agree on a plan, rewrite, lower, place parameters."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile.cache.graph_cache import CachedGraph, GraphCache
from hpml_compiler.compile.cache.graph_cache_key import CacheInputs
from hpml_compiler.compile.decide.rank_planner import RankPlanner, say_plan, say_what_is_whole
from hpml_compiler.compile.graph_compiler import GraphCompiler, Halves
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs, guard_on_rows, sizes_are_numbers
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.lower.lowering import Call
from hpml_compiler.compile.program.loop_program import LoopProgram
from hpml_compiler.compile.program.microbatch_autograd import Keeps, MicrobatchedStep, compile_in_microbatches, microbatch_count
from hpml_compiler.compile.recompile_limit import note_function
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata, SessionEntry, held_by, placements_of
from hpml_compiler.compile.wrapper.runtime_wrapper import backward_wrapper, runtime_wrapper
from hpml_compiler.compile.wrapper.sharded_outputs import ShardedTangent, sharded_outputs_of, sharded_tangents_of
from hpml_compiler.monitor.hooks import WatchedGraph
from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpoint_problem import tape_of_body
from hpml_compiler.planner.checkpointing.checkpointing_choice import with_checkpointing
from hpml_compiler.planner.graph.graph_planning import PlanResult, solver_options
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.planner.graph.microbatch_estimate import with_microbatches
from hpml_compiler.planner.graph.microbatching import joint_of_loss, loss_of, memory_model_in_time, microbatch_placement
from hpml_compiler.planner.search.fitting_search import FittingSearch
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.plans.unsplit_graph import why_not_split
from hpml_compiler.runtime.consistency.input_check import draws_random_numbers
from hpml_compiler.runtime.consistency.rank_sync import CompiledTogether, from_rank_0, same_graph
from hpml_compiler.runtime.dtensor.lazy_outputs import ShardedOutput
from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.runtime.watchdog.barrier_check import CALLING, require_all_ranks
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from hpml_compiler.session.run_monitor import monitor_of
from hpml_compiler.session.step_memory import step_context
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.loops.loop_parts import LoopSplit
from passes.hardware.mesh import mesh_from_pin
from passes.presets import after_planning, building_storage_program
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.solver.work_limit import WorkLimit
from passes.transforms.shard.hoist_batch_slice import Taken, batch_slices_of

log = logging.getLogger("hpml")


class SpmdCompiler(GraphCompiler):
    """One graph, split over all ranks."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options):
        super().__init__(gm, given, options, f"graph_{len(session.current().graphs)}")
        self.cluster = local_cluster(options, dist.get_world_size())
        self.sharing: StepContext | None = None
        self.budgeted: GraphMemory | None = None
        if options.memory_budget is not None:
            self.sharing = step_context(self.session.step, gm, given, options, self.cluster.device.memory_bytes)
            self.options = self.sharing.options
        self.planned: PlanResult | None = None
        self.allowance: WorkLimit | None = None
        self.watched: WatchedGraph | None = None
        self.all_ranks = CompiledTogether(self.name)
        self.metadata: RuntimeMetadata | None = None
        self.taken: dict[int, Taken] = {}
        self.record: GraphPlan
        self.left: tuple[ShardedOutput, ...] = ()
        self.tangents: tuple[ShardedTangent, ...] = ()

    def compile(self) -> Callable[..., Any]:
        note_function()
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
            del self.session.graphs[planned_before:]  # all ranks forget what will not run, and may compile it again
            raise
        takes = self.metadata or self._metadata()
        self.record.blocks.update((self.lowering if self.program is None else self.program).reports)
        session.save_plan()
        self.earlier.keep(takes)
        return runtime_wrapper(self.record.name, function, self.gm, self.given, self.inputs, takes,
                               self.session.device_mesh(self.record.mesh), self.holding, self.watched, self.options)

    def _as_in(self, earlier: RuntimeMetadata) -> None:
        """Enter what an earlier launch made of this graph, as if it had just been planned."""
        entry = earlier.entry
        assert entry is not None, "it was planned at once"
        self.session.groups(entry.record.mesh)  # the halves know them by their names
        record = entry.record.model_copy(update={"seconds": {}, "frame": compat.frame_being_compiled()})
        self.metadata, self.tangents = replace(earlier, entry=replace(entry, record=record)), earlier.tangents
        self.inputs.gathered, self.inputs.written = set(earlier.gathered), set(earlier.written)
        self.holding.note(earlier.held)
        self._enter(record, entry.cluster, entry.rejected, earlier.training)
        if self.sharing is not None and earlier.budgeted is not None:
            self.session.step.graphs[self.sharing.frame] = earlier.budgeted
        if dist.get_rank() == 0:
            self.session.decided.setdefault(entry.structure, record)
            say_what_is_whole(entry.unruled)
        self._finish()

    def split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        if self.microbatches > 1 and (runs := self._in_microbatches(joint, forward_outputs)) is not None:
            self.program = runs
            self._finish()
            self.earlier.note(runs.cut, runs.parts.saved)
            return None
        sharded = self._rewrite(joint, forward_outputs)
        if self.sharing is None:
            self._finish()
            return self.halves(sharded, inputs, forward_outputs, static_inputs)
        return self._within_budget(sharded, self.sharing, forward_outputs)

    def _within_budget(self, sharded: GraphModule, sharing: StepContext, forward_outputs: int) -> Halves:
        assert self.planned is not None and self.planned.kept is not None, "under a budget, what is kept is planned"
        trial = self.planner.trial(sharing)
        building_storage_program(trial.tape(self.planned, self.session.groups(self.planned.mesh)))(sharded)
        self.budgeted = self.session.step.enter(sharing, trial.held(self.planned), self.planned.kept)
        self._finish()
        halves = self.lowering.cut(sharded, self.planned.kept, forward_outputs, self.options.offload_folder or "")
        self.note_halves(halves)
        return halves

    def restore(self, restored: Any, found: CachedGraph, forward_outputs: int) -> None:
        if found.running.budgeted is not None:
            self.lowering.count_bytes()
        if isinstance(restored, LoopProgram):
            self.program = MicrobatchedStep(self.options, restored, step_us=self.record.predicted.step_time_us, shares=False)

    def inference(self, gm: GraphModule) -> GraphModule:
        gm = self._rewrite(gm, None)
        self._finish()
        return gm

    def together(self, half: str, lower: Callable[[], Call]) -> Call:
        if half == "forward":
            compat.expect_gradients({tangent.number: tangent.part for tangent in self.tangents})
            return lower()
        return self.all_ranks.backward(lower)

    def backward_of(self, call: Call, gm: GraphModule) -> Call:
        return backward_wrapper(self.record.name, call, gm, {tangent.name for tangent in self.tangents}, self.watched)

    def _in_microbatches(self, joint: GraphModule, forward_outputs: int) -> MicrobatchedStep | None:
        """What runs the step microbatch by microbatch; None where that cannot be, which leaves the graph as it is."""
        gm = joint_of_loss(joint)
        annotated = self._annotated(gm, forward_outputs, self.microbatches)
        self.allowance = within = WorkLimit(self.options.time_limit)
        times = from_rank_0(lambda: microbatch_placement(annotated.graph, self.microbatches, solver_options(self.options),
                                                         within))
        if times is None:
            return None
        loss_inside, cluster = loss_of(gm) is not None, self.cluster

        def finish(planned: PlanResult) -> GraphPlan:
            return with_microbatches(planned.record, annotated.graph, times, loss_inside, mesh_from_pin(planned.mesh, cluster),
                                     self.options.optimizer_states)

        fitting = FittingSearch(self.options, cluster, finish, memory_model_in_time(times, loss_inside))
        planned = self._plan(annotated, forward_outputs, fitting, times)
        with self.doing("rewrite", "rewriting"):
            runs = compile_in_microbatches(
                gm, annotated, planned.decision, times, self.session.groups(planned.mesh), self.options, forward_outputs,
                self.inputs.kept_gradients(annotated, forward_outputs), step_us=planned.record.predicted.step_time_us,
                keep=None if self.sharing is None else self._keep_in_loop(planned, self.sharing))
        say_plan(planned, annotated.graph.unruled)
        return runs

    def _keep_in_loop(self, planned: PlanResult, sharing: StepContext) -> Keeps:
        """Makes the tape of the loop's body, which saves what was planned."""
        trial, kept = self.planner.trial(sharing), planned.kept
        assert kept is not None, "under a budget, what is saved is planned"

        def keep(marked: GraphModule, loop: LoopSplit) -> CheckpointDecision:
            tape = trial.tape(planned, self.session.groups(planned.mesh))
            building_storage_program(tape_of_body(marked, loop, tape))(loop.body)
            self.budgeted = self.session.step.enter(sharing, trial.held(planned), kept)
            return kept

        return keep

    def _finish(self) -> None:
        """The record of the graph is whole now."""
        if self.planned is not None and self.planned.kept is not None:
            self.planned = replace(self.planned, record=with_checkpointing(self.planned.record, self.planned.kept,
                                                                           self.options))
            self.record = self.session.graphs[-1] = self.planned.record
        if self.options.monitor:
            self.watched = WatchedGraph(monitor_of(self.options), self.record)
        session.save_plan()

    def _rewrite(self, gm: GraphModule, forward_outputs: int | None) -> GraphModule:
        annotated = self._annotated(gm, forward_outputs)
        planned = self._plan(annotated, forward_outputs)
        with self.doing("rewrite", "rewriting"):
            self.left = sharded_outputs_of(annotated, planned.decision)
            after_planning(
                planned.decision, self.session.groups(planned.mesh), self.options.compiler, forward_outputs,
                self.inputs.kept_gradients(annotated, forward_outputs),
                compact=self.options.memory_budget is not None or self.options.zero in (1, 2, 3),
                ahead=planned.kept is None or planned.kept.ahead,
                outside=self.inputs.only_read(annotated) if self.sharing is None else ())(gm)
            self.taken = {annotated.interface.positions[name]: taken for name, taken in batch_slices_of(gm).items()}
            self.tangents = sharded_tangents_of(annotated, planned.decision)
        say_plan(planned, annotated.graph.unruled)
        return gm

    def _annotated(self, gm: GraphModule, forward_outputs: int | None, microbatches: int = 1) -> AnalyzedGraph:
        """With what planning needs to know, once all ranks have the same graph."""
        with compile_phase("annotate", f"{self.name}: annotating", {}):  # which `annotate` counts itself
            annotated = self.inputs.annotate(gm, forward_outputs, microbatches)
        with compat.outside_tracing():
            require_all_ranks("compiling a graph", CALLING, every=0)
        same_graph(annotated.hash(), annotated.text)
        self.draws = draws_random_numbers(gm)
        return annotated

    def _plan(self, annotated: AnalyzedGraph, forward_outputs: int | None, fitting: FittingSearch | None = None,
              times: MicrobatchPlacement | None = None) -> PlanResult:
        """Plan the graph, the same on all ranks, and enter the plan in the session. fitting, times: see `RankPlanner`."""
        self.annotated = annotated
        self.planner = RankPlanner(annotated, self.inputs, self.options, self.sharing, forward_outputs, fitting=fitting,
                                   allowance=self.allowance, times=times)
        with compile_phase("plan", f"{self.name}: planning", {}):  # what of it is looking and solving is in the plan
            self.planned = planned = self.planner.agreed()
        self.holding.note(held_by(annotated, planned.decision))
        self._enter(planned.record, planned.cluster, planned.rejected, annotated.interface.training)
        self.session.device_mesh(planned.mesh)  # for which all ranks meet a last time
        self.all_ranks.agreed = True
        return planned

    def _enter(self, record: GraphPlan, cluster: str, rejected: Iterable[MeshAttempt], training: bool) -> None:
        self.record, self.lowering.step_us = record, record.predicted.step_time_us
        record.seconds.update(self.seconds)
        self.seconds = record.seconds
        self.session.graphs.append(record)
        self.session.options, self.session.cluster = self.options, cluster
        self.session.rejected.extend(rejected)
        if training:
            self.session.mesh = dict(record.mesh)
        if training and (why := why_not_split(record)):
            heartbeat.watch_neighbor()
            log.log(logging.DEBUG if dist.get_rank() else logging.WARNING, "%s", why)

    def _metadata(self) -> RuntimeMetadata:
        """What a call of the graph takes, now that it is compiled."""
        assert self.planned is not None, "AOTAutograd partitions every graph that it traces"
        annotated, planned = self.annotated, self.planned
        return RuntimeMetadata(
            annotated.interface.training, self.draws, placements_of(annotated, planned.decision),
            held_by(annotated, planned.decision), frozenset(self.inputs.gathered), frozenset(self.inputs.written), self.left,
            self.tangents, self.taken, budgeted=self.budgeted, graph_hash=planned.record.graph_hash, entry=SessionEntry(
                planned.record, planned.cluster, planned.rejected, dict(annotated.graph.unruled), self.planner.structure))
