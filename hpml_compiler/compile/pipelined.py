"""A graph whose step goes through the stages of a pipeline, each on a rank of its own, microbatch by microbatch.

Every rank traces and cuts the whole graph, and compiles what is around its loop and the stages that it runs. Where the mesh has
other axes than `pp`, the whole graph is planned on these, as if one stage did all, and what is cut is a rank's part of it.
Parameters are placed on these axes; along `pp`, one that a single rank's stages read is that rank's alone, with its gradient
(`hpml_compiler.compile.owners`), and others are on every rank: their gradients are made where their stage is, and given to the
others. A graph that goes through no stages borrows what it reads, at each call.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.agreement import GraphMismatch, from_rank_0, same_graph, when_all_can
from hpml_compiler.compile.cut_stages import Stages
from hpml_compiler.compile.evaluation import evaluation, has_effects
from hpml_compiler.compile.graph_inputs import GraphInputs, guard_on_rows, sizes_are_numbers
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.compile.microbatched import MakesWhole
from hpml_compiler.compile.monitoring import watch_of
from hpml_compiler.compile.phases import phase
from hpml_compiler.compile.pipeline import Pipeline
from hpml_compiler.compile.planner import Planner
from hpml_compiler.compile.recompiles import note_function
from hpml_compiler.compile.stage_mesh import StageMesh
from hpml_compiler.monitor.stages import StagesWatch
from hpml_compiler.options import Options
from hpml_compiler.planning.microbatches import fitting_rows, loss_alone, times_of
from hpml_compiler.planning.plan_graph import Planned, solver_options
from hpml_compiler.planning.stage_axes import STAGES_AXIS, lifetimes_of, schedule_of
from hpml_compiler.planning.staged_plan import StagedPlan
from hpml_compiler.runtime.alike import own_values, same_values
from hpml_compiler.runtime.calls import backward_call, forward_call
from hpml_compiler.runtime.compared import draws_random_numbers, of_backward, of_forward
from hpml_compiler.runtime.doing import Spot
from hpml_compiler.runtime.gathered import Held, Holding
from hpml_compiler.runtime.microbatches import Call
from hpml_compiler.runtime.owned import Owned, owner_of
from hpml_compiler.runtime.parameters import install
from hpml_compiler.runtime.together import CALLING, together
from passes import compat
from passes.analysis.stages import TooFewParts
from passes.errors import HpmlError
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.graph.decision import Decision
from passes.graph.nodes import returned_nodes
from passes.partition.in_time import InTime, on_one_device, on_time_axis
from passes.partition.lifetimes import THROUGHOUT
from passes.presets import after_planning, one_device, to_microbatches, whole_batch
from passes.tracing.trace import decompositions
from passes.transform.collectives import MeshGroups

log = logging.getLogger("hpml")


class PipelinedGraph:
    """One Dynamo graph on its way through the compiler."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options):
        self.gm, self.given, self.options = gm, inputs, options
        self.name = f"graph of a pipeline, {len(session.current().graphs)}"
        self.mesh = StageMesh(options.mesh or {})
        self.lowering = Lowering(options.compiler, blocks=options.compile_blocks)
        self.holding = Holding()
        self.runs: Pipeline | None = None
        self.placements: dict[int, tuple[Placement, ...]] = {}
        self.owned: dict[str, int] | None = None
        """Parameters that one rank has alone in this graph, by their placeholders; None before that is known."""
        self.own_here: set[int] = set()
        self.times: InTime | None = None
        self.planned: Planned | None = None
        self.watched: StagesWatch | None = None
        self.seconds: dict[str, float] = {}
        self.draws = self.training = False

    def compile(self) -> Callable[..., Any]:
        note_function()
        guard_on_rows(self.gm)
        self.inputs = GraphInputs(self.gm, self.given, self.options)
        self.inputs.take_rows_whole()
        sizes_are_numbers(self.gm, examples := self.inputs.examples)
        self.microbatches = self._microbatches()
        with self._doing("trace", "tracing"):
            function = compat.aot_autograd(
                fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=self._inference,
                partition_fn=self._partition, decompositions=decompositions(self.options.compiler))(self.gm, examples)
        if self.runs is not None:
            session.save_plan()  # which says now what was compiled in blocks
        same_values(own_values(self.inputs.described, self.given))
        borrowed = {k for k, x in enumerate(self.given) if owner_of(x) is not None} - self.inputs.gathered - self.own_here
        installed = install(self.placements, self.gm, self.given, self.mesh.devices, self.inputs.gathered, self.inputs.written,
                            self.holding, borrowed)

        def call(*args: Any) -> Any:
            given = installed.locals(args)
            results = function(*given)
            if installed.writes:
                installed.write_back(args, given)
            return results

        half = of_forward(self.name, self.inputs.described, self.given, self.draws)
        call = call if self.watched is None else self.watched.forward(call)
        return forward_call(call, Spot(f"forward of {self.name}"), half, self.training)

    def _microbatches(self) -> int:
        """As many as divide the rows that a stage's rank has at the least."""
        shapes = [x.shape for x, its in zip(self.inputs.examples, self.inputs.described, strict=True) if its.kind == "batch"]
        return fitting_rows(shapes, self.options.microbatches, self.mesh.axes.get("dp", 1), speaks=dist.get_rank() == 0)

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        original = copied(joint)
        self.training = True
        self._together(joint)
        whole = None if self.mesh.is_split else lambda: self._pipeline(copied(original), num_fwd_outputs, None)[1]
        try:
            stages, self.runs = self._pipeline(loss_alone(joint), num_fwd_outputs, whole)
        except TooFewParts as error:
            if dist.get_rank() == 0:
                log.warning("%s goes through no stages, and each does all of it: %s", self.name, error.what)
            return self._all_of_it(joint, inputs, num_fwd_outputs, kwargs)
        runs, found = self.runs, stages.staged.stages
        starts = tuple(blocks[0] for blocks in found.blocks[1:])
        session.current().stage_starts[compat.frame_being_compiled()] = starts
        self._note_plan(original, num_fwd_outputs, stages, runs)
        if self.options.monitor:
            self.watched = watch_of(self.name, runs.table, runs.place, found, self.options)
        return runs.partition()

    def _evaluation(self, gm: GraphModule) -> Pipeline | None:
        """None where it cannot go through stages, which is said."""
        if has_effects(gm):
            return None
        outputs = len(returned_nodes(gm))
        self._together(gm)
        try:
            annotated = self._annotated(gm, None, self.microbatches)
            self._place_in_time(annotated)
            microbatches = self._mark(annotated, self._decision(annotated, None), outputs)
            starts = session.current().stage_starts.get(compat.frame_being_compiled(), ())
            with self._doing("rewrite", "cutting into stages"):
                stages = Stages(self.options, gm, microbatches, outputs, annotated.interface, starts)
        except GraphMismatch:
            raise
        except HpmlError as error:
            log.info("%s goes through no stages, and the ranks of each do all of it: %s", self.name, error.what)
            return None
        return Pipeline(self.options, stages.given_to(self._owners(stages, annotated.interface.positions), (), False))

    def _note_plan(self, traced: GraphModule, forward_outputs: int, stages: Stages, runs: Pipeline) -> None:
        current, cluster = session.current(), local_cluster(self.options, dist.get_world_size())
        current.options, current.cluster = self.options, str(cluster)
        plan = StagedPlan(traced, self.inputs.described, forward_outputs, self.options, cluster, self.times, self.planned)
        current.unplanned.append(lambda name: plan.plan(name, stages.marked, stages.staged, stages.table).model_copy(
            update={"blocks": runs.reports, "seconds": self.seconds}))
        session.save_plan()

    def _all_of_it(self, joint: GraphModule, inputs: Any, forward_outputs: int, kwargs: dict[str, Any]) -> Any:
        """Forward and backward of what is too small for stages, as the loss is where the graph breaks before it."""
        if self.mesh.is_split:
            annotated = self._annotated(joint, forward_outputs)
            gradients = self.inputs.kept_gradients(annotated, forward_outputs)
            after_planning(self._decision(annotated, forward_outputs), self.mesh.groups(), self.options.compiler,
                           forward_outputs, gradients)(joint)
        else:
            one_device(self.options.compiler)(joint)
        return self.lowering.partition(joint, inputs, forward_outputs, kwargs.get("static_lifetime_input_indices"))

    def _pipeline(self, joint: GraphModule, forward_outputs: int, whole: MakesWhole | None,
                  ) -> tuple[Stages, Pipeline]:
        annotated = self._annotated(joint, forward_outputs, self.microbatches)
        interface = annotated.interface
        self._place_in_time(annotated)
        microbatches = self._mark(annotated, self._decision(annotated, forward_outputs), forward_outputs)
        with self._doing("rewrite", "cutting into stages"):
            stages = Stages(self.options, joint, microbatches, forward_outputs, interface)
        cut = stages.given_to(self._owners(stages, interface.positions), self.inputs.written, whole is not None)
        return stages, Pipeline(self.options, cut, whole)

    def _place_in_time(self, annotated: Annotated) -> None:
        graph, count = annotated.graph, self.microbatches
        with self._doing("solve", "deciding what goes through microbatches"):
            self.times = None if count == 1 else from_rank_0(lambda: times_of(graph, count, solver_options(self.options)))

    def _owners(self, stages: Stages, positions: Mapping[str, int]) -> dict[str, int]:
        """Who has the parameters that one rank needs alone. What was given to another rank before is borrowed from it."""
        if self.owned is not None:  # for gradients at other outputs, the graph is cut once more
            return self.owned
        found = stages.needs.owners(positions)
        self.owned = {}
        for name, position in positions.items():
            given, owner = self.given[position], found.get(name)
            if isinstance(given, DTensor):
                if owner is not None and owner_of(given) == owner:
                    self.owned[name] = owner
                    self.own_here.add(position)
            elif self.training and self.inputs.described[position].placeable:
                placements = self.placements.get(position, (Replicate(),) * len(self.mesh.sizes))
                if owner is not None and given.dim():
                    self.owned[name] = owner
                    placements = tuple(Owned(owner) if axis == STAGES_AXIS else placement
                                       for axis, placement in zip(self.mesh.sizes, placements, strict=True))
                self.placements[position] = placements
        return self.owned

    def _together(self, gm: GraphModule) -> None:
        self.draws = draws_random_numbers(gm)
        with compat.outside_tracing():
            together("compiling a graph", CALLING, every=0)

    def _annotated(self, gm: GraphModule, forward_outputs: int | None, microbatches: int = 1) -> Annotated:
        """With what planning needs to know, once all ranks have the same graph."""
        with self._doing("annotate", "annotating"):
            annotated = self.inputs.annotate(gm, forward_outputs, microbatches, leaves=False)
        same_graph(annotated.hash(), annotated.text)
        return annotated

    def _decision(self, annotated: Annotated, forward_outputs: int | None) -> Decision:
        """What each rank of a stage does, which all agree on."""
        if not self.mesh.is_split:
            given = self.options.load_plan()
            if given is not None and forward_outputs is not None:
                given.check(annotated.hash(), torch.__version__, dist.get_world_size())
            return on_one_device(annotated.graph)
        cluster = self.mesh.cluster(local_cluster(self.options, dist.get_world_size()))
        lifetimes = THROUGHOUT if forward_outputs is None else lifetimes_of(schedule_of(
            self.options, 1 if self.times is None else self.times.microbatches))
        with phase("plan", f"{self.name}: planning", {}):  # what of it is looking and solving is in the plan
            planned = Planner(annotated, self.inputs, self.mesh.options(self.options), None, forward_outputs, cluster,
                              lifetimes).agreed()
        for what in planned.record.seconds.keys() & {"look", "solve"}:
            self.seconds[what] = self.seconds.get(what, 0.0) + planned.record.seconds[what]
        values, positions = annotated.graph.values, dict(annotated.interface.positions)
        self.holding.note({values[v].name: Held.along(self.mesh.route_over_all(route), positions[values[v].name])
                           for v, route in planned.decision.held.items()})
        if annotated.interface.training:
            stored = annotated.interface.stored
            self.placements = {
                positions[values[v].name]: session.to_dtensor(self.mesh.over_all(planned.decision.stored(v)))
                for v in planned.decision.inputs if values[v].kind == "parameter" and values[v].name not in stored}
        if dist.get_rank() == 0:
            log.info("%s: each stage on the mesh %s, planned in %.2f s", self.name, planned.mesh,
                     sum(planned.record.seconds.values()))
        self.planned = planned
        return planned.decision

    def _mark(self, annotated: Annotated, decision: Decision, forward_outputs: int) -> int:
        """Put the markers of the loop in; returns how many microbatches go through it."""
        joint, graph, times, groups = annotated.gm, annotated.graph, self.times, self.mesh.groups()
        asks = self.options.compiler == "inductor"
        gradients = self.inputs.kept_gradients(annotated, forward_outputs) if self.training else ()
        with self._doing("rewrite", "rewriting"):
            if times is None:
                whole_batch(forward_outputs, gradients, decision if self.mesh.is_split else None, groups, asks)(joint)
                return 1
            groups = groups if self.mesh.is_split else MeshGroups((), (), ())
            to_microbatches(on_time_axis(decision, graph, times), groups.with_time(times.microbatches), forward_outputs,
                            gradients, asks)(joint)
            return times.microbatches

    def _forward(self, graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        if self.runs is not None:
            with self._doing("compile forward", "compiling forward"):
                return self.holding.around(graph, self.runs.forward())
        return self.holding.around(graph, self._when_all_can("forward", lambda: self.lowering.forward(graph, inputs)))

    def _backward(self, graph: GraphModule, inputs: Any) -> Call:
        call = self._when_all_can("backward", lambda: self.lowering.backward(graph, inputs)) if self.runs is None else (
            self.runs.backward())
        call = call if self.watched is None else self.watched.backward(call)
        return backward_call(call, Spot(f"backward of {self.name}"), of_backward(self.name, graph))

    def _inference(self, graph: GraphModule, _: Any) -> Callable[..., Any]:
        """Forward alone goes through the stages that have its parameters; else the ranks of each stage do all of it."""
        if any(owner_of(x) is not None for x in self.given) and (runs := self._evaluation(copied(graph))) is not None:
            with self._doing("compile forward", "compiling forward"):
                return self.holding.around(graph, evaluation(runs))
        if self.mesh.is_split:
            self._together(graph)
            annotated = self._annotated(graph, None)
            after_planning(self._decision(annotated, None), self.mesh.groups(), self.options.compiler)(graph)
        return self.holding.around(graph, self._when_all_can("forward", lambda: self.lowering.inference(graph)))

    def _when_all_can(self, half: str, lower: Callable[[], Call]) -> Call:
        """Of a graph without stages. All ranks come to each half together, in its first call where not before."""
        with self._doing(f"compile {half}", f"compiling {half}"):
            return when_all_can(f"compile {half} of the {self.name}", lower)

    def _doing(self, what: str, text: str) -> phase:
        return phase(what, f"{self.name}: {text}", self.seconds)
