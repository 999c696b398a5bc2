"""Make the decisions about one graph in a run, and rewrite it to the program of this rank.

Every rank traces and rewrites the full graph. Where its mesh has a `pp` axis, each rank cuts out its own stages. Parameters are
placed on the other axes. Along `pp`, a parameter that only one rank's stages read is on that rank alone, with its gradient
(`hpml_compiler.planner.pipeline.stage_parameters`); others are on every rank, and the rank of their stage computes their
gradients and broadcasts them. A graph that is not pipelined borrows such parameters from their owners at each call.
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.fx import GraphModule

from hpml_compiler.compile.decide.decided_graph import DecidedGraph
from hpml_compiler.compile.decide.running_ranks import RunningRanks
from hpml_compiler.compile.decide.stage_agreement import StageSplits, agreed_splits
from hpml_compiler.compile.program.program_builder import one_stage_program
from hpml_compiler.compile.program.stage_cutter import StageCutter, has_effects
from hpml_compiler.compile.program.step_program import StepProgram
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata, unsharded_inputs
from hpml_compiler.compile.wrapper.sharded_outputs import sharded_outputs_of, sharded_tangents_of
from hpml_compiler.compile.wrapper.stage_outputs import outputs_in_stages, outputs_of_stages
from hpml_compiler.compile.wrapper.stage_placements import owned_parameters, placed_in_stages
from hpml_compiler.planner.checkpointing.checkpoint_problem import body_builder
from hpml_compiler.planner.decide import decide, decide_unpipelined
from hpml_compiler.planner.graph.memory_budget import GraphMemory
from hpml_compiler.planner.graph.microbatching import joint_of_loss, loop_of, mark_loop
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.pipeline.stage_checkpointing import StagedStep, given_stages
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.stage_warnings import warn_without_stages
from hpml_compiler.planner.step_decision import DecidedStep, StepDecision
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.consistency.input_check import draws_random_numbers
from hpml_compiler.runtime.consistency.rank_sync import GraphMismatch, same_graph
from hpml_compiler.runtime.process.world_group import this_rank
from hpml_compiler.runtime.watchdog.barrier_check import CALLING, require_all_ranks
from passes import compat
from passes.errors import HpmlError
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.graph.layouts import Layout
from passes.pipeline.find_stages import TooFewBlocks
from passes.presets import after_planning, annotate, building_storage_program, one_device
from passes.sharding.loop_gathers import ONCE
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace
from passes.transforms.shard.hoist_batch_slice import batch_slices_of


class GraphDecisions(DecidedGraph):
    """Makes the decisions of a graph, on all ranks together."""

    def __init__(self, graph: DecidedGraph):
        """graph: the same, before anything was decided, or restored, to decide again."""
        vars(self).update(vars(graph))
        self.ranks = RunningRanks(self.inputs, self.entry)

    def metadata(self) -> RuntimeMetadata:
        takes, decided = replace(super().metadata(), decision=self.decided.decision), self.decided
        if self.stages is not None or decided.planned is None or decided.step is None:
            return takes
        return takes.of_plan(decided.step.annotated, decided.planned, self.ranks.structure)

    # -- decide --------------------------------------------------------------------------------------------------------

    def decide(self, joint: GraphModule, forward_outputs: int, traced: JointTrace | None, first: bool = True) -> DecidedStep:
        """Decide about a joint graph, which deciding may change. traced: a copy of it. first: False where the step is compiled
        again for gradients at all outputs."""
        if first:
            self.inputs.written = compat.mutated_inputs(joint)
        step = self._step(joint, forward_outputs, traced, first)
        decided = self.decided = self._decided_or_unpipelined(step, joint, first)
        if first and self.sharing is not None and decided.decision.checkpointing is not None:
            planned = decided.planned
            self._enter(self.sharing.replicated if planned is None else self._trial(decided).memory(planned), decided)
        return decided

    def decide_inference(self, gm: GraphModule) -> DecidedStep:
        """Decide about a forward graph that is not pipelined."""
        if self.alone:
            self.inputs.written = compat.mutated_inputs(gm)
            self.decided = DecidedStep(StepDecision())
        elif self.stages is None or self.stages.is_split:
            step = self._problem(self.analyze(gm, None), None, 1)
            self.decided = decide(step, self.ranks) if self.stages is None else decide_unpipelined(step, self.ranks)
            self._note_placements(self.decided)
        return self.decided

    def analyze(self, gm: GraphModule, forward_outputs: int | None, microbatches: int = 1) -> AnalyzedGraph:
        """The graph, analyzed for planning, after a check that all ranks have the same graph."""
        with self.entry.doing("annotate", "annotating"):
            annotated = self.inputs.annotate(gm, forward_outputs, microbatches, self.options.shards_outputs)
        with compat.outside_tracing():
            require_all_ranks("compiling a graph", CALLING, every=0)
        same_graph(annotated.text)
        self.takes = replace(self.takes, uses_rng=draws_random_numbers(gm))
        return annotated

    def _step(self, joint: GraphModule, forward_outputs: int, traced: JointTrace | None, first: bool) -> StepProblem:
        if self.microbatches > 1 or self.stages is not None:
            annotated = self.analyze(joint_of_loss(joint) if first else joint, forward_outputs, self.microbatches)
            step = self._problem(annotated, forward_outputs, self.microbatches, traced)
            if self.stages is None:  # where rows depend on each other, there is no loop
                full = lambda: self.analyze(joint, forward_outputs)  # noqa: E731
                if self.alone:
                    full = self._unchanged(joint, forward_outputs, traced).analyze
                step = replace(step, own=joint, analyze_full=full)
            return step
        if not self.alone:
            return self._problem(self.analyze(joint, forward_outputs), forward_outputs, 1, traced)
        return self._unchanged(joint, forward_outputs, traced)

    def _unchanged(self, joint: GraphModule, forward_outputs: int, traced: JointTrace | None) -> StepProblem:
        """The problem of a graph that is not to be placed: analyzed as a copy, if at all."""
        return StepProblem(self.name, lambda: annotate(copy_graph(joint), self.inputs.described, forward_outputs,
                                                       compiler=self.options.compiler), forward_outputs, self.options,
                           self.cluster, WorkLimit(self.options.time_limit), sharing=self.sharing, traced=traced, own=joint)

    def _problem(self, annotated: AnalyzedGraph, forward_outputs: int | None, microbatches: int,
                 traced: JointTrace | None = None) -> StepProblem:
        inputs, names = self.inputs, {p: n for n, p in annotated.interface.positions.items()}
        return StepProblem(
            self.session.next_name(), lambda: annotated, forward_outputs, self.options, self.cluster,
            WorkLimit(self.options.time_limit), microbatches, traced,
            kept_gradients=inputs.kept_gradients(annotated, forward_outputs), written=frozenset(inputs.written),
            sharing=self.sharing, rows=frozenset(names[p] for p in inputs.rows if p in names))

    def _decided_or_unpipelined(self, step: StepProblem, joint: GraphModule, first: bool) -> DecidedStep:
        try:
            decided = decide(step, self.ranks, first)
        except TooFewBlocks as error:
            return self._unpipelined(joint, step, error)
        self._note_placements(decided)
        return decided

    def _unpipelined(self, joint: GraphModule, step: StepProblem, why: TooFewBlocks) -> DecidedStep:
        """The decision about a graph that is too small for stages, such as the loss after a graph break."""
        if this_rank() == 0:
            warn_without_stages(self.name, why.what)
        assert self.stages is not None, "it was to be pipelined"
        if self.stages.is_split:
            step = self._problem(self.analyze(joint, step.forward_outputs), step.forward_outputs, 1, step.traced)
        else:
            step = self._unchanged(joint, step.outputs, step.traced)
        decided = decide_unpipelined(step, self.ranks)
        self._note_placements(decided)
        return decided

    def _note_placements(self, decided: DecidedStep) -> None:
        """Note the parameters that are taken unsharded and, in a pipeline, all placements inside the stages."""
        planned = decided.planned
        if planned is None or decided.step is None:
            return
        if self.stages is None:
            self.takes = replace(self.takes, unsharded=unsharded_inputs(decided.step.annotated, planned.decision))
            return
        self.takes = placed_in_stages(self.takes, decided.step.annotated, planned, self.stages)
        self.entry.note_stage(planned)

    # -- rewrite -------------------------------------------------------------------------------------------------------

    def program(self, joint: GraphModule, decided: DecidedStep, others: bool) -> StepProgram | None:
        """The program of a step in microbatches or stages; None for any other, and for a graph that is too small for stages.
        others: see `step_interface`."""
        self.note_chunks()  # those of one device, or of its loop
        step, decision = decided.step, decided.decision
        if step is None or decision.microbatches is None and decision.schedule is None:
            return None
        if self.stages is not None:
            self.takes = replace(self.takes, training=True)
            try:
                program = self._cut(decided, step, others)
                self.note_chunks()
                return program
            except TooFewBlocks as error:
                self.decided = self._unpipelined(joint, step, error)
                return None
        times, kept, annotated = decision.microbatches, decision.checkpointing, step.annotated
        assert times is not None, "it has a loop"
        gm, loop, placements = annotated.gm, decided.loop, decision.placements
        with self.entry.doing("rewrite", "rewriting"):
            outputs = () if placements is None else sharded_outputs_of(annotated, placements)
            if loop is None:
                groups = self.session.groups(decision.mesh)
                loop = loop_of(gm, annotated.graph, placements, times, groups, step.outputs, step.kept_gradients,
                               self.options.compiler, decision.gathers or ONCE, kept is None or kept.ahead,
                               self.options.is_compact, self.options.chunks)
                if kept is not None and decided.planned is not None:
                    builder = body_builder(gm, loop, self._trial(decided).builder(decided.planned, groups))
                    building_storage_program(builder)(loop.body)
            self.note_chunks()
            tangents = () if placements is None else sharded_tangents_of(annotated, placements)  # with local shapes
            self.takes = replace(self.takes, sharded_outputs=outputs, tangents=tangents)
            program = one_stage_program(gm, loop, times.microbatches, step.outputs, step.written, others, self.entry.step_us,
                                        kept, self.options.offload_folder or "")
        self.entry.log_plan(annotated.graph.unruled)
        return program

    def evaluation(self, gm: GraphModule) -> StepProgram | None:
        """Cut a forward graph into stages; None, with a warning, where that is not possible."""
        if self.stages is None or has_effects(gm):
            return None
        try:
            step = self._problem(self.analyze(gm, None, self.microbatches), None, self.microbatches)
            decided = decide(step, self.ranks)
            self._note_placements(decided)
            return self._cut(decided, step, False, self.session.stage_starts.get(compat.frame_being_compiled(), ()))
        except GraphMismatch:
            raise
        except HpmlError as error:
            if this_rank() == 0:
                warn_without_stages(self.name, error.what)
            return None

    def rewrite(self, gm: GraphModule, decided: DecidedStep, forward_outputs: int | None) -> None:
        """Turn a graph without a loop into this rank's program."""
        step, planned, compiler = decided.step, decided.planned, self.options.compiler
        if planned is None or step is None:
            if forward_outputs is not None and decided.decision.checkpointing is None:
                with self.entry.doing("rewrite", "rewriting"):
                    one_device(compiler)(gm)
            return
        annotated, decision, gradients = step.annotated, planned.decision, step.kept_gradients
        with self.entry.doing("rewrite", "rewriting"):
            outputs = sharded_outputs_of(annotated, decision, self._over_all)
            if self.stages is not None:
                after_planning(decision, self.stages.groups(), compiler, forward_outputs, gradients,
                               chunks=self.options.chunks)(gm)
                self.takes = replace(self.takes, sharded_outputs=outputs, tangents=sharded_tangents_of(annotated, decision))
                return
            after_planning(
                decision, self.session.groups(planned.mesh), compiler, forward_outputs, gradients,
                compact=self.options.is_compact, ahead=planned.checkpointing is None or planned.checkpointing.ahead,
                outside=() if self.options.memory_budget is not None else self.inputs.only_read(annotated),
                chunks=self.options.chunks)(gm)
            taken = {annotated.interface.positions[name]: each for name, each in batch_slices_of(gm).items()}
            tangents = sharded_tangents_of(annotated, decision)  # after the rewrite: with local shapes
            self.takes = replace(self.takes, sharded_outputs=outputs, slices=taken, tangents=tangents)
        self.note_chunks()
        self.entry.log_plan(annotated.graph.unruled)
        if planned.checkpointing is not None:
            building_storage_program(self._trial(decided).builder(planned, self.session.groups(planned.mesh)))(gm)

    def _cut(self, decided: DecidedStep, step: StepProblem, others: bool, starts: tuple[str, ...] = ()) -> StepProgram:
        """This rank's stages, and the graphs around their loop. starts: see `StageCutter`. Raises TooFewBlocks."""
        assert self.stages is not None, "there are stages"
        annotated, decision, training = step.annotated, decided.decision, step.forward_outputs is not None
        gm, outputs = annotated.gm, step.outputs if training else len(returned_nodes(annotated.gm))
        repeats = decision.gathers or ONCE
        keep = None if self.sharing is None or not training else partial(self._keep, decided, step, given_stages(step))
        found = outputs_of_stages(annotated, decision.placements, self.stages) if self.options.shards_outputs else ()
        with self.entry.doing("rewrite", "rewriting"):
            mark_loop(gm, annotated.graph, decision.placements, decision.microbatches, self.stages.groups(), outputs,
                      step.kept_gradients if training else (), self.options.compiler == "inductor", repeats)
        with self.entry.doing("rewrite", "cutting into stages"):
            alike = decision.placements is None or not any(axis.rows for axis in decision.placements.axes)
            cutter = StageCutter(self.options, gm, decision.microbatch_count, outputs, annotated.interface, starts, keep,
                                 repeats, alike)
        decision = decision if keep is None else self.decided.decision
        self.decided = replace(decided, decision=replace(decision, stages=cutter.staged.stages))
        alone = cutter.needs.outputs_alone() if found else {}
        if self.takes.owned is None:  # else the graph is cut once more, for gradients at other outputs
            positions = annotated.interface.positions
            numbers = {k: number for number, k in enumerate(cutter.needs.tensors)}
            self.takes = outputs_in_stages(self.takes, found, {numbers[k]: rank for k, rank in alone.items()}, annotated,
                                           self.stages)
            self.takes = owned_parameters(self.takes, cutter.needs.owners(positions), positions, self.given,
                                          self.inputs.described, self.stages, training)
        assert self.takes.owned is not None, "it was decided"
        tangents = {each.name: each.owner for each in self.takes.tangents if each.owner is not None}
        return cutter.given_to(self.takes.owned, step.written if training else (), others, alone, tangents)

    def _keep(self, decided: DecidedStep, step: StepProblem, given: GraphPlan | None, cut: StagedStep) -> StageSplits:
        """Decide what each stage saves under the memory budget. Returns how this rank's are split. given: a plan to apply."""
        assert self.stages and self.sharing, "there are stages, and a budget"
        with self.entry.doing("solve", "deciding which activations stages save"):
            kept, splits, fullest = agreed_splits(step, cut, decided.planned, self.stages, given)
        self.decided = replace(decided, decision=replace(decided.decision, stage_checkpointing=kept))
        if step.traced is not None:
            self.session.step.graphs[self.sharing.frame] = fullest
            self.takes = replace(self.takes, budgeted=fullest)
        return splits

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _over_all(self, layout: Layout) -> Layout:
        return layout if self.stages is None else self.stages.over_all(layout)

    def _trial(self, decided: DecidedStep) -> DryRun:
        assert decided.step is not None, "it was planned"
        return DryRun(decided.step, decided.decision.microbatches, decided.decision.gathers)

    def _enter(self, held: GraphMemory, decided: DecidedStep) -> None:
        """Enter the saved activations in the step. held: other memory of the graph on a rank."""
        kept = decided.decision.checkpointing
        assert self.sharing is not None and kept is not None, "without a budget, nothing is decided of it"
        self.takes = replace(self.takes, budgeted=self.session.step.enter(self.sharing, held, kept))
