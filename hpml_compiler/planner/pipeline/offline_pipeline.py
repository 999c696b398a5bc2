"""Plan a pipelined step offline, without ranks to run it.

The graph is prepared as a run does it until its stages are known, for a rank of the first stage.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.single_device_checkpointing import NO_LIMIT
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.graph_planning import PlanResult, plan_graph, solver_options
from hpml_compiler.planner.graph.microbatch_estimate import with_microbatches
from hpml_compiler.planner.graph.microbatching import joint_of_loss, loss_of, microbatch_placement
from hpml_compiler.planner.pipeline.extrapolated_stages import extrapolated_parts, lists_in_order
from hpml_compiler.planner.pipeline.layer_costs import LayerCosts, starts_of
from hpml_compiler.planner.pipeline.pipeline_estimate import with_pipeline
from hpml_compiler.planner.pipeline.pipeline_graph_plan import PipelinePlanBuilder
from hpml_compiler.planner.pipeline.pp_axis import (
    PP_AXIS,
    axes_of_stage,
    cluster_of_stage,
    devices_of_stage,
    is_split,
    memory_model_of,
    over_all_axes,
    schedule_of,
)
from hpml_compiler.planner.pipeline.stage_halves import stage_body, warn_of_empty_stages, warn_without_stages
from hpml_compiler.planner.search.budget_trials import cached_or_new_within
from hpml_compiler.planner.search.fitting_search import FittingSearch, check_fits
from hpml_compiler.planner.search.plan_cache import plan_cache_of
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import BadInput
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.hardware.axis import device_axes
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.pipeline.find_stages import TooFewBlocks
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.stage_assignment import StageAssignment
from passes.presets import annotate, to_microbatches, whole_batch
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.microbatch_axis import MicrobatchPlacement, replicated_decision, with_time_axis
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace
from passes.transforms.microbatch.loop_split import split_at_markers
from passes.transforms.shard.redistributor import MeshGroups


def plan_in_stages(traced: JointTrace, options: Options, cluster: Cluster, microbatches: int, name: str,
                   allowance: WorkLimit | None = None) -> GraphPlan:
    """Plan a traced graph in stages. traced: before any pass. microbatches: as many as its rows divide into. A graph with fewer
    parts than stages is planned without stages. allowance: replaces the options' time limit. Raises BadInput and Infeasible."""
    within = allowance or WorkLimit(options.time_limit)
    annotated = annotate(joint_of_loss(traced.gm), traced.inputs, traced.forward_outputs, microbatches, leaves=False)
    if (given := options.load_plan()) is not None:
        given.check(annotated.hash(), torch.__version__, cluster.world_size)
    times = None if microbatches == 1 else microbatch_placement(annotated.graph, microbatches, solver_options(options), within)
    table = schedule_of(options, 1 if times is None else times.microbatches)
    finish = CutPlan(traced, options, cluster, times, name, annotated)
    try:
        if is_split(options.mesh or {}):
            search = partial(stage_placements(annotated, options, cluster, name), allowance=within)
            _, record = stage_search(options, cluster, table, finish)(search)
        else:
            record = check_fits(finish(None), options, cluster)
    except TooFewBlocks as error:
        warn_without_stages(name, error.what)
        whole = annotate(copy_graph(traced.gm), traced.inputs, traced.forward_outputs)
        return plan_unpipelined(whole, options, cluster, name, within)
    assert finish.stages is not None, "it was cut"
    warn_of_empty_stages(name, finish.stages)
    return record


class CutPlan:
    """Makes the plan of a pipelined graph. traced: before any pass. annotated: the same with gradients at the loss alone; if
    None, made where it is needed. starts: first block of each stage but stage 0, if known. stages: those of the latest plan."""

    def __init__(self, traced: JointTrace, options: Options, cluster: Cluster, times: MicrobatchPlacement | None, name: str,
                 annotated: AnalyzedGraph | None = None, starts: tuple[str, ...] = ()):
        self.traced, self.options, self.cluster, self.times, self.name = traced, options, cluster, times, name
        self.annotated, self.starts = annotated, starts
        self.stages: StageAssignment | None = None

    def __call__(self, planned: PlanResult | None) -> GraphPlan:
        """planned: the plan of the ranks that share a stage, where there are several. Raises TooFewBlocks."""
        traced, times, outputs = self.traced, self.times, self.traced.forward_outputs
        count = 1 if times is None else times.microbatches
        if self.annotated is None:
            annotated = annotate(joint_of_loss(traced.gm), traced.inputs, outputs, count, leaves=False)
        else:
            annotated = AnalyzedGraph(copy_graph(self.annotated.gm), traced.inputs, {})
        gm, table = annotated.gm, schedule_of(self.options, count)
        _mark(annotated, planned, times, outputs)
        staged = stage_body(gm, annotated.interface.kinds, split_at_markers(gm), table.stages, self.cluster.device,
                            lambda find: find(), self.starts)
        self.stages = staged.stages
        made = PipelinePlanBuilder(traced.gm, traced.inputs, outputs, self.options, self.cluster, times, planned)
        return made.plan(self.name, gm, staged, table)


def plan_folded(folded: FewLayerTrace, annotated: AnalyzedGraph, forward_outputs: int, options: Options, cluster: Cluster,
                microbatches: int, name: str, allowance: WorkLimit | None = None) -> GraphPlan:
    """Plan a deep model of which a few layers were traced. Stage boundaries follow from the layers in the plan. Raises
    DepthsDiffer where these layers do not represent all."""
    mesh, within = options.mesh or {}, allowance or WorkLimit(options.time_limit)
    times = None if microbatches == 1 else microbatch_placement(annotated.graph, microbatches, solver_options(options), within)
    table = schedule_of(options, 1 if times is None else times.microbatches)
    search = partial(stage_placements(annotated, options, cluster, name, folded), allowance=within)

    def finish(planned: PlanResult) -> GraphPlan:
        return _folded_plan(planned, folded, annotated, forward_outputs, options, cluster, times, table, name)

    if is_split(mesh):
        return stage_search(options, cluster, table, finish)(search)[1]
    return check_fits(finish(search(lifetimes=memory_model_of(table))), options, cluster)


def _folded_plan(planned: PlanResult, folded: FewLayerTrace, annotated: AnalyzedGraph, forward_outputs: int, options: Options,
                 cluster: Cluster, times: MicrobatchPlacement | None, table: PipelineSchedule, name: str) -> GraphPlan:
    mesh, states = options.mesh or {}, options.optimizer_states
    alone = cluster_of_stage(cluster, mesh[PP_AXIS])
    record, prices = folded.of_all_layers(planned.record), MeshPrices(mesh_from_pin(planned.mesh, alone), states)
    if times is not None:
        record = with_microbatches(record, annotated.graph, times, loss_of(annotated.gm) is not None, prices.mesh, states)
    lists = lists_in_order(record, folded)
    gm = copy_graph(annotated.gm)
    _mark(AnalyzedGraph(gm, annotated.inputs, {}), planned if is_split(mesh) else None, times, forward_outputs)
    starts = starts_of(lists)
    try:
        staged = stage_body(gm, annotated.interface.kinds, split_at_markers(gm), len(starts) + 1, cluster.device,
                            lambda find: find(), starts)
    except BadInput as error:
        raise DepthsDiffer(f"its layers do not follow each other: {error.what}") from error
    warn_of_empty_stages(name, staged.stages)
    cut = LayerCosts(staged, len(lists), options.compiler, table)
    parts = extrapolated_parts(record, step_graph(record, PlannedPrices(record, RepricedPlan(record, prices))), lists, cut,
                               table)
    return with_pipeline(record, parts, table, mesh if is_split(mesh) else {PP_AXIS: options.stage_ranks}, cluster, states)


def _mark(annotated: AnalyzedGraph, planned: PlanResult | None, times: MicrobatchPlacement | None,
          forward_outputs: int) -> None:
    """Insert the loop markers, as the first rank of a stage does. planned: where a stage has several ranks."""
    gm, axes = annotated.gm, device_axes(planned.mesh if planned is not None else {})
    groups = MeshGroups(axes, (0,) * len(axes), tuple(f"planned_{axis.name}" for axis in axes))
    decision = planned.decision if planned is not None else replicated_decision(annotated.graph)
    gradients = range(forward_outputs, len(returned_nodes(gm)))
    if times is None:
        whole_batch(forward_outputs, gradients, None if planned is None else decision, groups)(gm)
    else:
        to_microbatches(with_time_axis(decision, annotated.graph, times), groups.with_time(times.microbatches), forward_outputs,
                        gradients)(gm)


def stage_placements(annotated: AnalyzedGraph, options: Options, cluster: Cluster, name: str,
                     folded: FewLayerTrace | None = None,
                     ) -> Callable[..., PlanResult]:
    """Search for placements of the full graph on the ranks of one stage; one rank has no choice. folded: the deeper model of
    which a few layers were traced."""
    own, alone = _of_one_stage(options), cluster_of_stage(cluster, options.stage_ranks)
    plan = partial(plan_graph, annotated, own, alone, name=name, given=own.load_plan())
    if not is_split(options.mesh or {}):
        plan = partial(plan, budget_bytes=NO_LIMIT)
    if folded is None:
        return plan
    plan = partial(plan, shorter=folded.shorter, further=folded.further)
    return partial(cached_or_new_within, plan_cache_of(annotated, own, alone, None, folded.further), plan)


def stage_search(options: Options, cluster: Cluster, table: PipelineSchedule,
                 finish: Callable[[PlanResult], GraphPlan]) -> FittingSearch:
    """The search for placements that fit, which counts the bytes of all stages."""
    return FittingSearch(options, cluster, finish, memory_model_of(table), options.stage_ranks)


def unpipelined_search(options: Options, cluster: Cluster) -> FittingSearch:
    """The search for a graph that is not pipelined: the ranks of every stage run it in full."""
    mesh = options.mesh or {}
    return FittingSearch(options, cluster, lambda planned: over_all_axes(
        planned.record, mesh if is_split(mesh) else {PP_AXIS: options.stage_ranks}))


def _of_one_stage(options: Options) -> Options:
    mesh = options.mesh or {}
    return options.model_copy(update={"mesh": axes_of_stage(mesh)} if is_split(mesh) else {"mesh": None, "plan": None})


def plan_unpipelined(annotated: AnalyzedGraph, options: Options, cluster: Cluster, name: str,
                     allowance: WorkLimit) -> GraphPlan:
    """Plan a graph that is not pipelined: the ranks of every stage run it in full. Raises Infeasible where it does not fit."""
    own, alone = _of_one_stage(options), devices_of_stage(cluster, options.stage_ranks)
    search = partial(plan_graph, annotated, own, alone, name=name, given=own.load_plan(), allowance=allowance)
    return unpipelined_search(options, cluster)(search)[1]
