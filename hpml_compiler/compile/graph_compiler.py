"""The path of one Dynamo graph through the compiler: inputs, cache, trace, decide, rewrite, split, lower, install.

Several ranks agree on a plan before anything is rewritten. One rank is a mesh without axes: nothing is placed, the remaining
decisions are made on the graph as it was traced, and its plan is made on demand, as that of pipeline stages.

AOTAutograd calls back: `partition_fn` gets the joint graph, where everything is decided and rewritten, and the two compilers
get forward and backward. On a hit of the graph cache, the callbacks take their results from there, and nothing is traced,
decided or rewritten.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from hpml_compiler.compile.cache.graph_cache import CachedGraph, GraphCache
from hpml_compiler.compile.cache.graph_cache_key import CacheInputs
from hpml_compiler.compile.cache.lazy_plan import PlanSource, joint_of
from hpml_compiler.compile.decide.decided_graph import DecidedGraph
from hpml_compiler.compile.decide.plan_entry import PlanEntry, warn_replicated
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs, guard_on_rows, sizes_are_numbers
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.lower.lowering import Call, Lowering
from hpml_compiler.compile.open_graph import DECIDED, OpenGraph
from hpml_compiler.compile.program.step_program import StepProgram
from hpml_compiler.compile.program.step_runtime import MakesWhole, StepRuntime
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.compile.wrapper.runtime_wrapper import backward_wrapper, runtime_wrapper
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import StepContext, raise_of_graph
from hpml_compiler.planner.stage_warnings import warn_without_stages
from hpml_compiler.planner.step_decision import DecidedStep, decomposes_loss
from hpml_compiler.planner.traced_passes import change_traced
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.consistency.rank_sync import CompiledTogether, same_options
from hpml_compiler.runtime.placements.single_rank_placement import owner_of
from hpml_compiler.runtime.placements.unsharded_params import UnshardedInputs
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from hpml_compiler.session.step_memory import step_context
from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.tracing.joint_trace import JointTrace, decompositions
from passes.tracing.named_passes import run_named_passes

if TYPE_CHECKING:
    from hpml_compiler.compile.decide.graph_decisions import GraphDecisions

log = logging.getLogger("hpml")
Halves = Sequence[GraphModule]


class GraphCompiler:
    """Compiles one graph for one rank or several, sharded, microbatched or in pipeline stages.

    name: in messages. deciding: what may be decided besides. program: runs the step where that takes more than one call of each
    half, as with microbatches or stages; None where AOTAutograd's halves are compiled as they are. entry: the graph's plan.
    """

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, deciding: OpenGraph = DECIDED):
        self.gm, self.given, self.options, self.deciding, self.session = gm, given, options, deciding, session.current()
        self.name = self.session.next_name()
        self.cluster, self.alone = local_cluster(options, world_size()), world_size() == 1
        self.sharing: StepContext | None = None
        if options.chooses_saved:
            self.sharing = step_context(self.session.step, gm, given, options, self.cluster.device.memory_bytes)
            self.options = self.sharing.options
        self.all_ranks = CompiledTogether(self.name)
        self.lowering = Lowering(options.compiler, None, options.compile_blocks, options.on_oom == "replan" and not self.alone)
        self.holding = UnshardedInputs()
        self.program: StepRuntime | None = None
        self.entry = PlanEntry(self.name, self.options, self.cluster)

    def compile(self) -> Callable[..., Any]:
        """Compile the graph. Returns the callable that replaces it in the script."""
        guard_on_rows(self.gm)
        self.inputs = GraphInputs(self.gm, self.given, self.options)
        if self.options.stage_ranks > 1:
            self.inputs.take_rows_whole()
        sizes_are_numbers(self.gm, self.inputs.examples)
        self.made = DecidedGraph(self.given, self.inputs, self.options, self.sharing, self.entry)
        planned_before = len(self.session.graphs)
        self.earlier = GraphCache(self.gm, CacheInputs.of(self.inputs, self.given), self.options, self.sharing,
                                  self.deciding.read)
        if self.earlier.entry is not None:
            self._as_in(self.earlier.entry.running)
        else:  # budgets may differ, as fractions of unlike devices do
            same_options({**self.options.to_json(of_run=True), "memory_budget": ""})
            self.deciding.obey(self.earlier.chosen, self.earlier.key)
        try:
            function = self.all_ranks.compile_all(self.trace)
        except Exception as error:
            del self.session.graphs[planned_before:]  # all ranks drop plans of graphs that failed, and may compile them again
            raise_of_graph(self.sharing, error)
        takes = self.made.metadata()
        if (record := self.entry.record) is not None:
            record.blocks.update(self._reports)
        if record is not None or self.program is not None:
            session.save_plan()  # again, now with the reports of regional compilation
        self.earlier.keep(takes)
        return runtime_wrapper(self.name, function, self.gm, self.given, self.inputs, takes, self.axes, self.holding,
                               self.entry.watched, self.options)

    @property
    def _reports(self) -> dict[str, BlocksReport]:
        return (self.lowering if self.program is None else self.program).reports

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the graph's mesh, once it is planned; none on one rank."""
        if self.made.stages is not None:
            return dict(self.made.stages.sizes)
        return {} if self.entry.record is None else dict(self.entry.record.mesh)

    def trace(self) -> Callable[..., Any]:
        """The compiled graph, as a function of plain local tensors."""
        seconds: dict[str, float] = {}
        with compile_phase("trace", f"{self.name}: tracing", seconds):
            function = compat.aot_autograd(
                fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=self._inference,
                partition_fn=self._partition, decompositions=self._decompositions(),
            )(self.earlier.graph, self.inputs.examples)
        self.entry.seconds.update(seconds)
        return function

    # -- callbacks of AOTAutograd --------------------------------------------------------------------------------------

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        if (found := self.earlier.entry) is None:
            with self.made.noting_chunks(), self.deciding.searching(self, joint, num_fwd_outputs):
                change_traced(joint, num_fwd_outputs, self.options, self.alone)
                self.earlier.note_results(joint, num_fwd_outputs)
                halves = self._split(joint, inputs, num_fwd_outputs, kwargs.get("static_lifetime_input_indices"))
        else:
            self.lowering.forward_outputs, self.lowering.shares = num_fwd_outputs, False
            halves = self._restored()
            self._restore(halves, found, num_fwd_outputs)
        return halves if self.program is None else self.program.partition()

    def _forward(self, gm: GraphModule, examples: Any) -> Call:
        self.earlier.note_forward()
        compat.expect_gradients({tangent.number: tangent.part for tangent in self.made.takes.tangents})
        with self.entry.doing("compile forward", "compiling forward"):
            call = self.program.forward() if self.program is not None else self.lowering.forward(gm, examples)
        return self.holding.around(gm, call)

    def _backward(self, gm: GraphModule, inputs: Any) -> Call:
        call = self.program.backward() if self.program is not None else (  # already compiled, with forward
            self.all_ranks.backward(lambda: self._compiled_backward(gm, inputs)))
        in_parts = {tangent.name for tangent in self.made.takes.tangents}
        return backward_wrapper(self.name, call, gm, self.axes, in_parts, self.entry.watched)

    def _compiled_backward(self, gm: GraphModule, inputs: Any) -> Call:
        self.earlier.note_backward()
        with self.entry.doing("compile backward", "compiling backward"), compat.restrict_overwriting(self.earlier.writes_over):
            return self.lowering.backward(gm, inputs)

    def _inference(self, gm: GraphModule, _: Any) -> Call:
        if self.earlier.entry is not None:
            graph = self._restored()
            self.all_ranks.agreed = not isinstance(graph, StepProgram)
        else:
            run_named_passes(self.options.passes, gm)
            self.earlier.note_results(gm, None)
            graph = self._rewritten_inference(gm)
            self.earlier.note(graph)
        self.earlier.note_forward()
        with self.entry.doing("compile forward", "compiling forward"):
            if isinstance(graph, StepProgram):
                call = StepRuntime(self.options, graph, shares=self.earlier.entry is None).inference()
            else:
                call = self.lowering.inference(graph)
        return self.holding.around(gm, call)

    def _decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Decompositions for tracing; on one rank under a budget and without microbatches, those of `hpml plan`."""
        whole = self.alone and self.sharing is not None and self.options.microbatches == 1 and not decomposes_loss(self.options)
        return None if whole and not self.lowering.inductor else decompositions(self.options.compiler)

    def _deciding(self) -> GraphDecisions:
        from hpml_compiler.compile.decide.graph_decisions import GraphDecisions  # here: on a hit of the cache, nothing plans

        if not isinstance(self.made, GraphDecisions):
            self.made = GraphDecisions(self.made)
        return self.made

    # -- decide, rewrite, split ----------------------------------------------------------------------------------------

    def _split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        """Forward and backward, noted for the cache; or None, with a `program` that runs instead of them."""
        made, traced = self._deciding(), None
        if made.stages is not None or self.alone and (self.sharing is not None or made.microbatches > 1):
            traced = JointTrace(copy_graph(joint), [*self.inputs.described], forward_outputs, 0.0)
        self._planned(self.deciding.reconsidered(self, made.decide(joint, forward_outputs, traced)))
        whole = self._whole_step(traced, forward_outputs)
        program = made.program(joint, made.decided, whole is not None)
        self.holding.note(made.takes.unsharded)
        if program is not None:
            self.program = StepRuntime(self.options, program, whole)
            self.earlier.note(program, program.parts.saved, self._finish(traced))
            return None
        made.rewrite(joint, made.decided, forward_outputs)
        self.all_ranks.agreed = True
        unplanned, kept = self._finish(traced), made.decided.decision.checkpointing
        if kept is None:
            halves = self.lowering.partition(joint, inputs, forward_outputs, static_inputs)
        else:
            halves = self.lowering.cut(joint, kept, forward_outputs, self.options.offload_folder or "")
        self.earlier.note(halves, (node and node.meta["val"] for node in returned_nodes(halves[0])), unplanned)
        return halves

    def _rewritten_inference(self, gm: GraphModule) -> StepProgram | GraphModule:
        """Forward alone runs through the stages that own its parameters; else every rank runs its share of the full graph."""
        made = self._deciding()
        if made.stages is not None and any(owner_of(x) is not None for x in self.given):
            program = made.evaluation(copy_graph(gm))
            if program is not None:
                self.holding.note(made.takes.unsharded)
                return program
        self._planned(decided := made.decide_inference(gm))
        self.holding.note(made.takes.unsharded)
        made.rewrite(gm, decided, None)
        self.all_ranks.agreed = True
        self._finish(None)
        return gm

    def _whole_step(self, traced: JointTrace | bytes | None, forward_outputs: int) -> MakesWhole | None:
        """Makes the same step for gradients at all outputs; None where values are placed. traced: the trace, or its packed
        plan."""
        if traced is None or not self.alone and (self.made.stages is None or self.made.stages.is_split):
            return None

        def make() -> StepRuntime | None:
            joint, made = joint_of(traced), self._deciding()
            program = made.program(joint, made.decide(joint, forward_outputs, None, first=False), False)
            return None if program is None else StepRuntime(self.options, program)

        return make

    # -- the plan ------------------------------------------------------------------------------------------------------

    def _planned(self, decided: DecidedStep) -> None:
        """Enter a plan that was made at once."""
        planned, step = decided.planned, decided.step
        if self.made.stages is not None or planned is None or step is None:
            return
        self.entry.enter(planned.record, planned.rejected, step.annotated.interface.training)
        self.lowering.step_us = self.entry.step_us
        self.session.device_mesh(planned.mesh)  # the last collective setup that all ranks meet for
        self.all_ranks.agreed = True

    def _finish(self, traced: JointTrace | None) -> PlanSource | None:
        """Complete the graph's entry. Returns the source of a plan that is made on demand, or None."""
        decided, decision = self.made.decided, self.made.decided.decision
        looped = decision.checkpointing is not None or decision.microbatches is not None
        if traced is None or decision.stages is None and not (self.alone and looped):
            self.entry.watch()
            return None
        source = PlanSource(traced, self.options, self.cluster, decision, decided.planned, self.sharing)
        self.entry.enter_later(source, decision, self._reports)
        return source

    # -- an earlier launch ---------------------------------------------------------------------------------------------

    def _as_in(self, earlier: RuntimeMetadata) -> None:
        """Restore the decisions of an earlier launch, as if they had just been made."""
        self.made.restore(earlier)
        self.holding.note(earlier.unsharded)
        self.all_ranks.agreed = self.made.stages is None
        if (entry := earlier.entry) is None:
            return
        record = entry.record.model_copy(update={"seconds": {}, "frame": compat.frame_being_compiled()})
        self.entry.enter(record, entry.rejected, earlier.training)
        self.lowering.step_us = self.entry.step_us
        if this_rank() == 0:
            self.session.decided.setdefault(entry.structure, record)
            warn_replicated(entry.unruled)
        self.entry.watch()

    def _restored(self) -> Any:
        with self.entry.doing("restore", "reading it from the graph cache"):
            return self.earlier.restored()

    def _restore(self, restored: Any, found: CachedGraph, forward_outputs: int) -> None:
        """Set `program` where the cache has one. restored: the graphs of the cache entry."""
        packed, decision = found.unplanned, found.running.decision
        if found.running.budgeted is not None:
            self.lowering.count_bytes()
        if isinstance(restored, StepProgram):
            self.program = StepRuntime(self.options, restored, self._whole_step(packed, forward_outputs), shares=False)
        elif self.made.stages is not None:
            self.all_ranks.agreed = True
            if this_rank() == 0:
                warn_without_stages(self.name, "as decided in an earlier launch")
        if packed is not None:
            self.entry.enter_later(packed, decision, self._reports)
