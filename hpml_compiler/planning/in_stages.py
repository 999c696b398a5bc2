"""The plan of a step that goes through the stages of a pipeline, where no rank is there to run it.

What a run does to its graph until its stages are known is done here, too, for a rank of the first stage.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hpml_compiler.options import Options
from hpml_compiler.planning.fits import Fitting, check_fits
from hpml_compiler.planning.folded_stages import folded_parts, lists_in_order
from hpml_compiler.planning.in_microbatches import with_microbatches
from hpml_compiler.planning.in_trials import remembered_within
from hpml_compiler.planning.layers_cut import LayersCut, starts_of
from hpml_compiler.planning.microbatches import loss_alone, loss_of, times_of
from hpml_compiler.planning.one_device import NO_LIMIT
from hpml_compiler.planning.pipeline_record import with_pipeline
from hpml_compiler.planning.plan_graph import Planned, plan_graph, solver_options
from hpml_compiler.planning.remembered import memory_of
from hpml_compiler.planning.shorten import Folded
from hpml_compiler.planning.stage_axes import (
    STAGES_AXIS,
    axes_of_stage,
    cluster_of_stage,
    devices_of_stage,
    is_split,
    lifetimes_of,
    over_all_axes,
    schedule_of,
)
from hpml_compiler.planning.staged_body import stage_body, warn_of_empty_stages, warn_without_stages
from hpml_compiler.planning.staged_plan import StagedPlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.prices import AsPlanned, Repriced
from hpml_compiler.simulate.step_graph import step_graph
from passes.analysis.stages import TooFewParts
from passes.costs.prices import MeshPrices
from passes.errors import BadInput
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.graph.nodes import returned_nodes
from passes.graph.stages import Stages
from passes.machine.axis import device_axes
from passes.machine.cluster import Cluster
from passes.machine.mesh import mesh_from_pin
from passes.partition.depth import NotLinear
from passes.partition.in_time import InTime, on_one_device, on_time_axis
from passes.presets import annotate, to_microbatches, whole_batch
from passes.schedule.actions import Schedule
from passes.solve.allowance import Allowance
from passes.tracing.trace import Traced
from passes.transform.collectives import MeshGroups
from passes.transform.microbatches import cut_loop


def plan_in_stages(traced: Traced, options: Options, cluster: Cluster, microbatches: int, name: str,
                   allowance: Allowance | None = None) -> GraphPlan:
    """traced: before any pass. microbatches: as many as its rows divide into. One that has fewer parts than there are stages is
    planned as each rank does all of it. allowance: in place of the options' time limit. Raises BadInput and Infeasible."""
    within = allowance or Allowance(options.time_limit)
    annotated = annotate(loss_alone(traced.gm), traced.inputs, traced.forward_outputs, microbatches, leaves=False)
    if (given := options.load_plan()) is not None:
        given.check(annotated.hash(), torch.__version__, cluster.world_size)
    times = None if microbatches == 1 else times_of(annotated.graph, microbatches, solver_options(options), within)
    table = schedule_of(options, 1 if times is None else times.microbatches)
    finish = AsCut(traced, options, cluster, times, name, annotated)
    try:
        if is_split(options.mesh or {}):
            search = partial(search_of_stage(annotated, options, cluster, name), allowance=within)
            _, record = fitting_of_stage(options, cluster, table, finish)(search)
        else:
            record = check_fits(finish(None), options, cluster)
    except TooFewParts as error:
        warn_without_stages(name, error.what)
        whole = annotate(copied(traced.gm), traced.inputs, traced.forward_outputs)
        return plan_all_of_it(whole, options, cluster, name, within)
    assert finish.stages is not None, "it was cut"
    warn_of_empty_stages(name, finish.stages)
    return record


class AsCut:
    """Makes the plan of a graph that goes through stages. traced: before any pass. annotated: the same with gradients at the
    loss alone; made where it is needed if None. starts: the block that each stage but the first begins with, where they are
    not to be found. stages: those of the latest plan."""

    def __init__(self, traced: Traced, options: Options, cluster: Cluster, times: InTime | None, name: str,
                 annotated: Annotated | None = None, starts: tuple[str, ...] = ()):
        self.traced, self.options, self.cluster, self.times, self.name = traced, options, cluster, times, name
        self.annotated, self.starts = annotated, starts
        self.stages: Stages | None = None

    def __call__(self, planned: Planned | None) -> GraphPlan:
        """planned: what the ranks of a stage do, where there are several. Raises TooFewParts."""
        traced, times, outputs = self.traced, self.times, self.traced.forward_outputs
        count = 1 if times is None else times.microbatches
        if self.annotated is None:
            annotated = annotate(loss_alone(traced.gm), traced.inputs, outputs, count, leaves=False)
        else:
            annotated = Annotated(copied(self.annotated.gm), traced.inputs, {})
        gm, table = annotated.gm, schedule_of(self.options, count)
        _mark(annotated, planned, times, outputs)
        staged = stage_body(gm, annotated.interface.kinds, cut_loop(gm), table.stages, self.cluster.device,
                            lambda find: find(), self.starts)
        self.stages = staged.stages
        made = StagedPlan(traced.gm, traced.inputs, outputs, self.options, self.cluster, times, planned)
        return made.plan(self.name, gm, staged, table)


def plan_folded(folded: Folded, annotated: Annotated, forward_outputs: int, options: Options, cluster: Cluster,
                microbatches: int, name: str, allowance: Allowance | None = None) -> GraphPlan:
    """The same of a deep model, of which a few layers were traced. Where it is cut follows from what the plan lists. Raises
    NotLinear where these layers do not stand for all."""
    mesh, within = options.mesh or {}, allowance or Allowance(options.time_limit)
    times = None if microbatches == 1 else times_of(annotated.graph, microbatches, solver_options(options), within)
    table = schedule_of(options, 1 if times is None else times.microbatches)
    search = partial(search_of_stage(annotated, options, cluster, name, folded), allowance=within)

    def finish(planned: Planned) -> GraphPlan:
        return _folded_plan(planned, folded, annotated, forward_outputs, options, cluster, times, table, name)

    if is_split(mesh):
        return fitting_of_stage(options, cluster, table, finish)(search)[1]
    return check_fits(finish(search(lifetimes=lifetimes_of(table))), options, cluster)


def _folded_plan(planned: Planned, folded: Folded, annotated: Annotated, forward_outputs: int, options: Options,
                 cluster: Cluster, times: InTime | None, table: Schedule, name: str) -> GraphPlan:
    mesh, states = options.mesh or {}, options.optimizer_states
    alone = cluster_of_stage(cluster, mesh[STAGES_AXIS])
    record, prices = folded.of_all_layers(planned.record), MeshPrices(mesh_from_pin(planned.mesh, alone), states)
    if times is not None:
        record = with_microbatches(record, annotated.graph, times, loss_of(annotated.gm) is not None, prices.mesh, states)
    lists = lists_in_order(record, folded)
    gm = copied(annotated.gm)
    _mark(Annotated(gm, annotated.inputs, {}), planned if is_split(mesh) else None, times, forward_outputs)
    starts = starts_of(lists)
    try:
        staged = stage_body(gm, annotated.interface.kinds, cut_loop(gm), len(starts) + 1, cluster.device,
                            lambda find: find(), starts)
    except BadInput as error:
        raise NotLinear(f"its layers do not follow each other: {error.what}") from error
    warn_of_empty_stages(name, staged.stages)
    cut = LayersCut(staged, len(lists), options.compiler, table)
    parts = folded_parts(record, step_graph(record, AsPlanned(record, Repriced(record, prices))), lists, cut, table)
    return with_pipeline(record, parts, table, mesh if is_split(mesh) else {STAGES_AXIS: options.stage_ranks}, cluster, states)


def _mark(annotated: Annotated, planned: Planned | None, times: InTime | None, forward_outputs: int) -> None:
    """Put the markers of the loop in, as the first rank of a stage does. planned: where a stage has several."""
    gm, axes = annotated.gm, device_axes(planned.mesh if planned is not None else {})
    groups = MeshGroups(axes, (0,) * len(axes), tuple(f"planned_{axis.name}" for axis in axes))
    decision = planned.decision if planned is not None else on_one_device(annotated.graph)
    gradients = range(forward_outputs, len(returned_nodes(gm)))
    if times is None:
        whole_batch(forward_outputs, gradients, None if planned is None else decision, groups)(gm)
    else:
        to_microbatches(on_time_axis(decision, annotated.graph, times), groups.with_time(times.microbatches), forward_outputs,
                        gradients)(gm)


def search_of_stage(annotated: Annotated, options: Options, cluster: Cluster, name: str, folded: Folded | None = None,
                    ) -> Callable[..., Planned]:
    """Placements of everything, as the ranks of one stage would do it; one rank has no choice. folded: of which deeper model
    the graph has a few layers."""
    own, alone = _of_one_stage(options), cluster_of_stage(cluster, options.stage_ranks)
    plan = partial(plan_graph, annotated, own, alone, name=name, given=own.load_plan())
    if not is_split(options.mesh or {}):
        plan = partial(plan, budget_bytes=NO_LIMIT)
    if folded is None:
        return plan
    plan = partial(plan, shorter=folded.shorter, further=folded.further)
    return partial(remembered_within, memory_of(annotated, own, alone, None, folded.further), plan)


def fitting_of_stage(options: Options, cluster: Cluster, table: Schedule, finish: Callable[[Planned], GraphPlan]) -> Fitting:
    """Of such placements, which count the bytes of all stages."""
    return Fitting(options, cluster, finish, lifetimes_of(table), options.stage_ranks)


def fitting_of_all(options: Options, cluster: Cluster) -> Fitting:
    """Of a graph that the ranks of every stage do all of."""
    mesh = options.mesh or {}
    return Fitting(options, cluster, lambda planned: over_all_axes(
        planned.record, mesh if is_split(mesh) else {STAGES_AXIS: options.stage_ranks}))


def _of_one_stage(options: Options) -> Options:
    mesh = options.mesh or {}
    return options.model_copy(update={"mesh": axes_of_stage(mesh)} if is_split(mesh) else {"mesh": None, "plan": None})


def plan_all_of_it(annotated: Annotated, options: Options, cluster: Cluster, name: str, allowance: Allowance) -> GraphPlan:
    """Of a graph that the ranks of every stage do all of. Raises Infeasible where that does not fit."""
    own, alone = _of_one_stage(options), devices_of_stage(cluster, options.stage_ranks)
    search = partial(plan_graph, annotated, own, alone, name=name, given=own.load_plan(), allowance=allowance)
    return fitting_of_all(options, cluster)(search)[1]
