"""The plan of a step that goes through the stages of a pipeline, where no rank is there to run it.

What a run does to its graph until its stages are known is done here, too, for a rank of the first stage.
"""
from __future__ import annotations

from functools import partial

import torch

from hpml_compiler.options import Options
from hpml_compiler.planning.fits import check_fits
from hpml_compiler.planning.folded_stages import folded_parts, lists_in_order
from hpml_compiler.planning.in_microbatches import with_microbatches
from hpml_compiler.planning.in_trials import remembered
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
from hpml_compiler.visualize.text import format_bytes
from passes.analysis.stages import TooFewParts
from passes.costs.prices import MeshPrices
from passes.errors import BadInput, Infeasible
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.graph.nodes import returned_nodes
from passes.machine.axis import device_axes
from passes.machine.cluster import Cluster
from passes.machine.mesh import mesh_from_pin
from passes.partition.depth import NotLinear
from passes.partition.in_time import InTime, on_one_device, on_time_axis
from passes.presets import annotate, to_microbatches, whole_batch
from passes.schedule.actions import Schedule
from passes.tracing.trace import Traced
from passes.transform.collectives import MeshGroups
from passes.transform.microbatches import cut_loop


def plan_in_stages(traced: Traced, options: Options, cluster: Cluster, microbatches: int, name: str) -> GraphPlan:
    """traced: before any pass. microbatches: as many as its rows divide into. One that has fewer parts than there are stages is
    planned as each rank does all of it. Raises BadInput and Infeasible."""
    gm, outputs = loss_alone(traced.gm), traced.forward_outputs
    annotated = annotate(gm, traced.inputs, outputs, microbatches, leaves=False)
    if (given := options.load_plan()) is not None:
        given.check(annotated.hash(), torch.__version__, cluster.world_size)
    times = None if microbatches == 1 else times_of(annotated.graph, microbatches, solver_options(options))
    table = schedule_of(options, 1 if times is None else times.microbatches)
    planned = plan_of_stage(annotated, options, cluster, table, name) if is_split(options.mesh or {}) else None
    _mark(annotated, planned, times, outputs)
    try:
        staged = stage_body(gm, annotated.interface.kinds, cut_loop(gm), table.stages, cluster.device, lambda find: find())
    except TooFewParts as error:
        warn_without_stages(name, error.what)
        return _all_of_it(traced, options, cluster, table, name)
    warn_of_empty_stages(name, staged.stages)
    plan = StagedPlan(traced.gm, traced.inputs, outputs, options, cluster, times, planned)
    return check_fits(plan.plan(name, gm, staged, table), options, cluster)


def plan_as_cut(traced: Traced, options: Options, cluster: Cluster, times: InTime | None, planned: Planned | None,
                starts: tuple[str, ...], name: str) -> GraphPlan:
    """The plan of a graph of which all that was decided, which is not decided again. times, planned: see `StagedPlan`. starts:
    the block that each stage but the first begins with."""
    gm, outputs = loss_alone(traced.gm), traced.forward_outputs
    count = 1 if times is None else times.microbatches
    annotated = annotate(gm, traced.inputs, outputs, count, leaves=False)
    table = schedule_of(options, count)
    _mark(annotated, planned, times, outputs)
    staged = stage_body(gm, annotated.interface.kinds, cut_loop(gm), table.stages, cluster.device, lambda find: find(), starts)
    return StagedPlan(traced.gm, traced.inputs, outputs, options, cluster, times, planned).plan(name, gm, staged, table)


def plan_folded(folded: Folded, annotated: Annotated, forward_outputs: int, options: Options, cluster: Cluster,
                microbatches: int, name: str) -> GraphPlan:
    """The same of a deep model, of which a few layers were traced. Where it is cut follows from what the plan lists. Raises
    NotLinear where these layers do not stand for all."""
    mesh, states = options.mesh or {}, options.optimizer_states
    times = None if microbatches == 1 else times_of(annotated.graph, microbatches, solver_options(options))
    table = schedule_of(options, 1 if times is None else times.microbatches)
    planned = plan_of_stage(annotated, options, cluster, table, name, folded)
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
    mesh = mesh if is_split(mesh) else {STAGES_AXIS: options.stage_ranks}
    return check_fits(with_pipeline(record, parts, table, mesh, cluster, states), options, cluster)


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


def plan_of_stage(annotated: Annotated, options: Options, cluster: Cluster, table: Schedule, name: str,
                  folded: Folded | None = None) -> Planned:
    """Of everything, as the ranks of one stage would do it. folded: of which deeper model it has a few layers. Raises
    Infeasible where what the stages hold does not fit, however a stage is split; one rank has no choice, and is only told."""
    mesh = options.mesh or {}
    stages, split = mesh[STAGES_AXIS], is_split(mesh)
    alone = cluster_of_stage(cluster, stages)
    own = options.model_copy(update={"mesh": axes_of_stage(mesh)} if split else {"mesh": None, "plan": None})
    plan = partial(plan_graph, annotated, own, alone, name=name, lifetimes=lifetimes_of(table),
                   budget_bytes=None if split else NO_LIMIT, given=own.load_plan())
    try:
        if folded is None:
            return plan()
        plan = partial(plan, shorter=folded.shorter, further=folded.further)
        return remembered(memory_of(annotated, own, alone, None, folded.further), plan)
    except Infeasible as error:
        smallest, device = error.smallest_budget_bytes, format_bytes(cluster.device.memory_bytes)
        least = "" if smallest is None else f", {format_bytes(smallest / stages)} at the least,"
        raise Infeasible(f"what a rank of {stages} stages holds{least} does not fit its device of {device}", name,
                         "take more stages, split them further, or take more microbatches") from error


def _all_of_it(traced: Traced, options: Options, cluster: Cluster, table: Schedule, name: str) -> GraphPlan:
    whole, mesh = annotate(copied(traced.gm), traced.inputs, traced.forward_outputs), options.mesh or {}
    record = plan_of_stage(whole, options, cluster, table, name).record
    return over_all_axes(record, mesh if is_split(mesh) else {STAGES_AXIS: options.stage_ranks})
