"""Decide for a pipelined graph: placements inside a stage, the microbatch loop, stage boundaries and parameter owners. All
ranks decide together and get the same result."""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.fx import GraphModule

from hpml_compiler.compile.decide.rank_planner import RankPlanner
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.inputs.pp_mesh import PipelineMesh
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.program.pipeline_inference import has_effects
from hpml_compiler.compile.program.pipeline_program import PipelineProgram, StageCutter
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import PlanResult, solver_options
from hpml_compiler.planner.graph.microbatching import fitting_microbatches, microbatch_placement
from hpml_compiler.planner.pipeline.offline_pipeline import CutPlan, plan_unpipelined, stage_search, unpipelined_search
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, cluster_of_stage, devices_of_stage, schedule_of
from hpml_compiler.planner.pipeline.stage_halves import warn_without_stages
from hpml_compiler.planner.search.fitting_search import FittingSearch, check_fits, fits_replicated
from hpml_compiler.runtime.consistency.input_check import draws_random_numbers
from hpml_compiler.runtime.consistency.rank_sync import GraphMismatch, from_rank_0, same_graph
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank, owner_of
from hpml_compiler.runtime.placements.unsharded_params import GatheredInput
from hpml_compiler.runtime.watchdog.barrier_check import CALLING, require_all_ranks
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from passes import compat
from passes.errors import HpmlError
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.graph.layouts import stored_layout
from passes.hardware.cluster import Cluster
from passes.pipeline.stage_assignment import StageAssignment
from passes.presets import after_planning, annotate, one_device, to_microbatches, whole_batch
from passes.sharding.microbatch_axis import MicrobatchPlacement, replicated_decision, with_time_axis
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace
from passes.transforms.shard.redistributor import MeshGroups

log = logging.getLogger("hpml")


class PipelinePlanner:
    """Plans the pipeline stages of one graph. seconds: compile time by phase, accumulated here."""

    def __init__(self, name: str, given: Sequence[Any], inputs: GraphInputs, options: Options, mesh: PipelineMesh,
                 seconds: dict[str, float]):
        self.name, self.given, self.inputs, self.options, self.mesh = name, given, inputs, options, mesh
        self.seconds, self.cluster = seconds, local_cluster(options, dist.get_world_size())
        self.allowance: WorkLimit | None = None
        self.placements: dict[int, tuple[Placement, ...]] = {}
        self.owned: dict[str, int] | None = None
        """Parameters that only one rank has, in this graph: placeholder -> rank; None before that is decided."""
        self.own_here: set[int] = set()
        self.held: dict[str, GatheredInput] = {}
        self.found: StageAssignment | None = None
        self.times: MicrobatchPlacement | None = None
        self.planned: PlanResult | None = None
        self.draws = self.training = False
        self.microbatches = self._microbatches()

    def takes(self) -> RuntimeMetadata:
        """Metadata for the runtime wrapper, once the graph is compiled."""
        return RuntimeMetadata(self.training, self.draws, self.placements, self.held, frozenset(self.inputs.gathered),
                               frozenset(self.inputs.written), owned=self.owned, own_here=frozenset(self.own_here),
                               stages=self.found, graph_hash="" if self.planned is None else self.planned.record.graph_hash)

    def as_in(self, earlier: RuntimeMetadata) -> None:
        """Restore the decisions of an earlier launch."""
        self.training, self.draws, self.found = earlier.training, earlier.draws, earlier.stages
        self.placements, self.held, self.own_here = dict(earlier.placements), dict(earlier.held), set(earlier.own_here)
        self.owned = None if earlier.owned is None else dict(earlier.owned)
        self.inputs.gathered, self.inputs.written = set(earlier.gathered), set(earlier.written)

    def together(self, gm: GraphModule) -> None:
        """Wait until all ranks have traced the graph."""
        self.draws = draws_random_numbers(gm)
        with compat.outside_tracing():
            require_all_ranks("compiling a graph", CALLING, every=0)

    def cut(self, joint: GraphModule, forward_outputs: int, others: bool, traced: JointTrace | None = None) -> PipelineProgram:
        """Cut the joint graph, which this changes, into stages. others: see `StepInterface.of`. traced: the same graph before
        any pass, where it may not fit on a device. Raises TooFewBlocks, and Infeasible where it does not fit."""
        annotated = self._annotated(joint, forward_outputs, self.microbatches)
        interface = annotated.interface
        self._place_in_time(annotated)
        alone, as_cut = cluster_of_stage(self.cluster, self.mesh.sizes[PP_AXIS]), None
        if traced is not None:
            as_cut = CutPlan(traced, self.options, self.cluster, self.times, self.name, annotated)
            if not self.mesh.is_split:  # one rank has no choice
                from_rank_0(lambda: self._check_cut(annotated, as_cut))
        decision = self._decision(annotated, forward_outputs, alone, self._fitting(annotated, as_cut))
        microbatches = self._mark(annotated, decision, forward_outputs)
        with self._doing("rewrite", "cutting into stages"):
            stages = StageCutter(self.options, joint, microbatches, forward_outputs, interface)
        self.found = stages.staged.stages
        return stages.given_to(self._owners(stages, interface.positions), self.inputs.written, others)

    def evaluation(self, gm: GraphModule) -> PipelineProgram | None:
        """Cut a forward-only graph into stages; None, with a warning, where that is not possible."""
        if has_effects(gm):
            return None
        outputs = len(returned_nodes(gm))
        self.together(gm)
        try:
            annotated = self._annotated(gm, None, self.microbatches)
            self._place_in_time(annotated)
            alone = cluster_of_stage(self.cluster, self.mesh.sizes[PP_AXIS])
            microbatches = self._mark(annotated, self._decision(annotated, None, alone), outputs)
            starts = session.current().stage_starts.get(compat.frame_being_compiled(), ())
            with self._doing("rewrite", "cutting into stages"):
                stages = StageCutter(self.options, gm, microbatches, outputs, annotated.interface, starts)
        except GraphMismatch:
            raise
        except HpmlError as error:
            if dist.get_rank() == 0:
                warn_without_stages(self.name, error.what)
            return None
        return stages.given_to(self._owners(stages, annotated.interface.positions), (), False)

    def whole(self, gm: GraphModule, forward_outputs: int | None) -> None:
        """Rewrite a graph that is not pipelined, so that each rank of a stage runs its share of the full graph: one that is too
        small for stages, such as the loss after a graph break, or one without backward."""
        if self.mesh.is_split:
            annotated = self._annotated(gm, forward_outputs)
            gradients = self.inputs.kept_gradients(annotated, forward_outputs)
            alone = devices_of_stage(self.cluster, self.mesh.sizes[PP_AXIS])
            decision = self._decision(annotated, forward_outputs, alone, unpipelined_search(self.options, self.cluster))
            after_planning(decision, self.mesh.groups(), self.options.compiler, forward_outputs, gradients)(gm)
        elif forward_outputs is not None:
            from_rank_0(lambda: self._check_all_of_it(gm, forward_outputs))
            one_device(self.options.compiler)(gm)

    def _fitting(self, annotated: AnalyzedGraph, as_cut: CutPlan | None) -> FittingSearch | None:
        """The search for placements inside a stage that fit its ranks; None where any placement fits."""
        if as_cut is None or fits_replicated(annotated, self.options, self.cluster):
            return None
        table = schedule_of(self.options, 1 if self.times is None else self.times.microbatches)
        return stage_search(self.options, self.cluster, table, as_cut)

    def _check_cut(self, annotated: AnalyzedGraph, as_cut: CutPlan) -> None:
        """Raises Infeasible where the stages of the rank with the highest peak do not fit."""
        if not fits_replicated(annotated, self.options, self.cluster):
            check_fits(as_cut(None), self.options, self.cluster)

    def _check_all_of_it(self, gm: GraphModule, forward_outputs: int) -> None:
        """Raises Infeasible where the graph does not fit on one device."""
        annotated = annotate(copy_graph(gm), self.inputs.described, forward_outputs)
        if not fits_replicated(annotated, self.options, self.cluster):
            plan_unpipelined(annotated, self.options, self.cluster, self.name, WorkLimit(self.options.time_limit))

    def _microbatches(self) -> int:
        """Number of microbatches: as many as divide the rows that one rank of a stage has at the least."""
        shapes = [x.shape for x, its in zip(self.inputs.examples, self.inputs.described, strict=True) if its.kind == "batch"]
        return fitting_microbatches(shapes, self.options.microbatches, self.mesh.axes.get("dp", 1), speaks=dist.get_rank() == 0)

    def _place_in_time(self, annotated: AnalyzedGraph) -> None:
        graph, count = annotated.graph, self.microbatches
        with self._doing("solve", "deciding what goes through microbatches"):
            solver, within = solver_options(self.options), WorkLimit(self.options.time_limit)
            self.allowance = within
            self.times = None if count == 1 else from_rank_0(lambda: microbatch_placement(graph, count, solver, within))

    def _owners(self, stages: StageCutter, positions: Mapping[str, int]) -> dict[str, int]:
        """Owners of the parameters that only one rank needs. A parameter placed on another rank before is lent by that rank."""
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
                    placements = tuple(SingleRank(owner) if axis == PP_AXIS else placement
                                       for axis, placement in zip(self.mesh.sizes, placements, strict=True))
                self.placements[position] = placements
        return self.owned

    def _annotated(self, gm: GraphModule, forward_outputs: int | None, microbatches: int = 1) -> AnalyzedGraph:
        """The graph, analyzed for planning, after a check that all ranks have the same graph."""
        with self._doing("annotate", "annotating"):
            annotated = self.inputs.annotate(gm, forward_outputs, microbatches, leaves=False)
        same_graph(annotated.text)
        return annotated

    def _decision(self, annotated: AnalyzedGraph, forward_outputs: int | None, alone: Cluster,
                  fitting: FittingSearch | None = None,
                  ) -> Decision:
        """Placements inside a stage, the same on all ranks. alone: the devices of one stage."""
        if not self.mesh.is_split:
            given = self.options.load_plan()
            if given is not None and forward_outputs is not None:
                given.check(annotated.hash(), torch.__version__, dist.get_world_size())
            return replicated_decision(annotated.graph)
        with compile_phase("plan", f"{self.name}: planning", {}):  # the plan has the times of looking and solving
            planned, _ = RankPlanner(annotated, self.inputs, self.mesh.options(self.options), None, forward_outputs, alone,
                                     fitting,
                                     self.allowance).searched()
        for what in planned.record.seconds.keys() & {"look", "solve"}:
            self.seconds[what] = self.seconds.get(what, 0.0) + planned.record.seconds[what]
        values, positions = annotated.graph.values, dict(annotated.interface.positions)
        self.held = {values[v].name: GatheredInput.along(self.mesh.route_over_all(route), positions[values[v].name])
                     for v, route in planned.decision.held.items()}
        if annotated.interface.training:
            stored = annotated.interface.stored
            self.placements = {
                positions[values[v].name]: session.to_dtensor(
                    stored_layout(values[v], self.mesh.over_all(planned.decision.stored(v))))
                for v in planned.decision.inputs if values[v].kind == "parameter" and values[v].name not in stored}
        if dist.get_rank() == 0:
            log.info("%s: each stage on the mesh %s, planned in %.2f s", self.name, planned.mesh,
                     sum(planned.record.seconds.values()))
        self.planned = planned
        return planned.decision

    def _mark(self, annotated: AnalyzedGraph, decision: Decision, forward_outputs: int) -> int:
        """Insert the loop markers; returns the number of microbatches."""
        joint, graph, times, groups = annotated.gm, annotated.graph, self.times, self.mesh.groups()
        asks = self.options.compiler == "inductor"
        gradients = self.inputs.kept_gradients(annotated, forward_outputs) if self.training else ()
        with self._doing("rewrite", "rewriting"):
            if times is None:
                whole_batch(forward_outputs, gradients, decision if self.mesh.is_split else None, groups, asks)(joint)
                return 1
            groups = groups if self.mesh.is_split else MeshGroups((), (), ())
            to_microbatches(with_time_axis(decision, graph, times), groups.with_time(times.microbatches), forward_outputs,
                            gradients, asks)(joint)
            return times.microbatches

    def _doing(self, what: str, text: str) -> compile_phase:
        return compile_phase(what, f"{self.name}: {text}", self.seconds)
