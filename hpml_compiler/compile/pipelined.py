"""A graph whose step goes through the stages of a pipeline, each on a rank of its own, microbatch by microbatch.

Every rank traces and cuts the whole graph, and compiles what is around its loop and the stages that it runs. Where the mesh has
other axes than `pp`, the whole graph is planned on these, as if one stage did all, and what is cut is a rank's part of it.
Parameters are placed on these axes; along `pp`, one that a single rank's stages read is that rank's alone, with its gradient
(`hpml_compiler.compile.owners`), and others are on every rank: their gradients are made where their stage is, and given to the
others. A graph that goes through no stages borrows what it reads, at each call.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.agreement import when_all_can
from hpml_compiler.compile.cut_stages import CutInStages
from hpml_compiler.compile.earlier import Earlier, Entry
from hpml_compiler.compile.evaluation import evaluation
from hpml_compiler.compile.graph_inputs import GraphInputs, guard_on_rows, sizes_are_numbers
from hpml_compiler.compile.launch_key import Given
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.compile.microbatched import MakesWhole
from hpml_compiler.compile.monitoring import watch_of
from hpml_compiler.compile.phases import phase
from hpml_compiler.compile.pipeline import Pipeline
from hpml_compiler.compile.plan_stages import StagesPlanner
from hpml_compiler.compile.recompiles import note_function
from hpml_compiler.compile.running_stages import InStages, running_in_stages
from hpml_compiler.compile.stage_mesh import StageMesh
from hpml_compiler.compile.unplanned import Later, Unplanned, UnplannedInStages, unpacked
from hpml_compiler.monitor.stages import StagesWatch
from hpml_compiler.options import Options
from hpml_compiler.planning.microbatches import loss_alone
from hpml_compiler.planning.staged_body import warn_of_empty_stages, warn_without_stages
from hpml_compiler.runtime.calls import backward_call
from hpml_compiler.runtime.compared import of_backward
from hpml_compiler.runtime.doing import Spot
from hpml_compiler.runtime.gathered import Holding
from hpml_compiler.runtime.inner_shard import InnerShard
from hpml_compiler.runtime.microbatches import Call
from hpml_compiler.runtime.owned import Owned, owner_of
from passes import compat
from passes.analysis.stages import TooFewParts
from passes.graph.copied import copied
from passes.graph.stages import Stages as FoundStages
from passes.tracing.trace import Traced, decompositions
from passes.transform.microbatches import Loop


class PipelinedGraph:
    """One Dynamo graph on its way through the compiler."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options):
        self.gm, self.given, self.options = gm, inputs, options
        self.name = f"graph of a pipeline, {len(session.current().graphs)}"
        self.mesh = StageMesh(options.mesh or {})
        self.lowering = Lowering(options.compiler, blocks=options.compile_blocks)
        self.holding = Holding()
        self.runs: Pipeline | None = None
        self.watched: StagesWatch | None = None
        self.seconds: dict[str, float] = {}

    def compile(self) -> Callable[..., Any]:
        note_function()
        guard_on_rows(self.gm)
        self.inputs = GraphInputs(self.gm, self.given, self.options)
        self.inputs.take_rows_whole()
        sizes_are_numbers(self.gm, examples := self.inputs.examples)
        self.planner = StagesPlanner(self.name, self.given, self.inputs, self.options, self.mesh, self.seconds)
        self.earlier = Earlier(self.gm, Given.of(self.inputs, self.given), self.options,
                               kinds=(InStages, CutInStages, Loop, Owned, InnerShard))
        if self.earlier.found is not None:
            self.mesh.groups()  # what was cut knows them by their names
            self.planner.as_in(self.earlier.found.running)
        with self._doing("trace", "tracing"):
            function = compat.aot_autograd(
                fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=self._inference,
                partition_fn=self._partition, decompositions=decompositions(self.options.compiler),
            )(self.earlier.graph, examples)
        if self.runs is not None:
            session.save_plan()  # which says now what was compiled in blocks
        takes, planned = self.planner.takes(), self.planner.planned
        self.earlier.keep(takes, takes.written, takes.plan(), "" if planned is None else planned.record.graph_hash)
        return running_in_stages(self.name, function, self.gm, self.given, self.inputs, takes, self.mesh.devices, self.holding,
                                 self.watched)

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        planner = self.planner
        if self.earlier.found is not None:
            return self._restored(self.earlier.found, num_fwd_outputs)
        self.earlier.note_results(joint, num_fwd_outputs)
        original = copied(joint)
        planner.training = True
        planner.together(joint)
        whole = self._whole_step(lambda: original, num_fwd_outputs)
        try:
            cut = planner.cut(loss_alone(joint), num_fwd_outputs, whole is not None)
        except TooFewParts as error:
            if dist.get_rank() == 0:
                warn_without_stages(self.name, error.what)
            return self._all_of_it(joint, inputs, num_fwd_outputs, kwargs)
        assert planner.found is not None, "what is cut has stages"
        self.runs = Pipeline(self.options, cut, whole)
        traced = Traced(original, self.inputs.described, num_fwd_outputs, 0.0)
        cluster = local_cluster(self.options, dist.get_world_size())
        unplanned = UnplannedInStages(traced, self.options, cluster, planner.times, planner.planned, starts_of(planner.found))
        self._note_plan(unplanned, self.runs, planner.found)
        self.earlier.note(cut, cut.parts.saved, unplanned)
        return self.runs.partition()

    def _all_of_it(self, joint: GraphModule, inputs: Any, forward_outputs: int, kwargs: dict[str, Any]) -> Any:
        self.planner.whole(joint, forward_outputs)
        halves = self.lowering.partition(joint, inputs, forward_outputs, kwargs.get("static_lifetime_input_indices"))
        self.earlier.note_halves(halves)
        return halves

    def _restored(self, found: Entry, forward_outputs: int) -> Any:
        """What an earlier launch left in the place of the traced graph."""
        with self._doing("restore", "reading what it was rewritten to"):
            restored = self.earlier.restored()
        packed, stages = found.unplanned, self.planner.found
        if not isinstance(restored, CutInStages):
            if dist.get_rank() == 0:
                warn_without_stages(self.name, "as in an earlier launch")
            self.lowering.forward_outputs, self.lowering.shares = forward_outputs, False
            return restored
        assert packed is not None and stages is not None, "of what has stages, a plan can be asked for"
        whole = self._whole_step(lambda: unpacked(packed).traced.gm, forward_outputs)
        self.runs = Pipeline(self.options, restored, whole, shares=False)
        self._note_plan(packed, self.runs, stages)
        return self.runs.partition()

    def _whole_step(self, traced: Callable[[], GraphModule], forward_outputs: int) -> MakesWhole | None:
        """The same for gradients at all outputs; None where a stage has several ranks."""
        if self.mesh.is_split:
            return None
        return lambda: Pipeline(self.options, self.planner.cut(copied(traced()), forward_outputs, False))

    def _note_plan(self, unplanned: Unplanned | bytes, runs: Pipeline, found: FoundStages) -> None:
        if dist.get_rank() == 0:
            warn_of_empty_stages(self.name, found)
        current = session.current()
        current.stage_starts[compat.frame_being_compiled()] = starts_of(found)
        current.options, current.cluster = self.options, str(local_cluster(self.options, dist.get_world_size()))
        current.unplanned.append(Later(unplanned, self.seconds, runs.reports))
        session.save_plan()
        if self.options.monitor:
            self.watched = watch_of(self.name, runs.table, runs.place, found, self.options)

    def _forward(self, graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.earlier.note_forward()
        if self.runs is not None:
            with self._doing("compile forward", "compiling forward"):
                return self._around(graph, self.runs.forward())
        return self._around(graph, self._when_all_can("forward", lambda: self.lowering.forward(graph, inputs)))

    def _backward(self, graph: GraphModule, inputs: Any) -> Call:
        call = self.runs.backward() if self.runs is not None else (
            self._when_all_can("backward", lambda: self._compiled_backward(graph, inputs)))
        call = call if self.watched is None else self.watched.backward(call)
        return backward_call(call, Spot(f"backward of {self.name}"), of_backward(self.name, graph))

    def _compiled_backward(self, graph: GraphModule, inputs: Any) -> Call:
        self.earlier.note_backward()
        with compat.writing_only_over(self.earlier.writes_over):
            return self.lowering.backward(graph, inputs)

    def _inference(self, graph: GraphModule, _: Any) -> Callable[..., Any]:
        """Forward alone goes through the stages that have its parameters; else the ranks of each stage do all of it."""
        if self.earlier.found is not None:
            with self._doing("restore", "reading what it was rewritten to"):
                restored = self.earlier.restored()
        else:
            self.earlier.note_results(graph, None)
            restored = self._cut_or_whole(graph)
            self.earlier.note(restored)
        self.earlier.note_forward()
        if isinstance(restored, CutInStages):
            with self._doing("compile forward", "compiling forward"):
                shares = self.earlier.found is None
                return self._around(graph, evaluation(Pipeline(self.options, restored, shares=shares)))
        return self._around(graph, self._when_all_can("forward", lambda: self.lowering.inference(restored)))

    def _cut_or_whole(self, graph: GraphModule) -> CutInStages | GraphModule:
        planner = self.planner
        if any(owner_of(x) is not None for x in self.given) and (cut := planner.evaluation(copied(graph))) is not None:
            return cut
        if self.mesh.is_split:
            planner.together(graph)
            planner.whole(graph, None)
        return graph

    def _around(self, graph: GraphModule, call: Call) -> Call:
        self.holding.note(self.planner.held)
        return self.holding.around(graph, call)

    def _when_all_can(self, half: str, lower: Callable[[], Call]) -> Call:
        """Of a graph without stages. All ranks come to each half together, in its first call where not before."""
        with self._doing(f"compile {half}", f"compiling {half}"):
            return when_all_can(f"compile {half} of the {self.name}", lower)

    def _doing(self, what: str, text: str) -> phase:
        return phase(what, f"{self.name}: {text}", self.seconds)


def starts_of(stages: FoundStages) -> tuple[str, ...]:
    """The block that each stage but the first begins with."""
    return tuple(blocks[0] for blocks in stages.blocks[1:])
