"""The plan of a step that goes through the stages of a pipeline, where no rank is there to run it.

What a run does to its graph until its stages are known is done here, too, for a rank of the first stage.
"""
from __future__ import annotations

import logging

from hpml_compiler.options import Options
from hpml_compiler.planning.microbatches import loss_alone, times_of
from hpml_compiler.planning.plan_graph import plan_graph, solver_options
from hpml_compiler.planning.staged_body import stage_body
from hpml_compiler.planning.staged_plan import StagedPlan, one_rank_of
from hpml_compiler.plans.schema import GraphPlan
from passes.analysis.stages import TooFewParts
from passes.graph.copied import copied
from passes.graph.nodes import returned_nodes
from passes.machine.cluster import Cluster
from passes.partition.in_time import on_one_device, on_time_axis
from passes.presets import annotate, to_microbatches, whole_batch
from passes.schedule.actions import schedule
from passes.tracing.trace import Traced
from passes.transform.collectives import MeshGroups
from passes.transform.microbatches import cut_loop

log = logging.getLogger("hpml")
ALONE = MeshGroups((), (), ())


def plan_in_stages(traced: Traced, options: Options, cluster: Cluster, microbatches: int, name: str) -> GraphPlan:
    """traced: before any pass. microbatches: as many as its rows divide into. One that has fewer parts than there are stages is
    planned as each rank does all of it. Raises BadInput and Infeasible."""
    gm, outputs = loss_alone(traced.gm), traced.forward_outputs
    annotated = annotate(gm, traced.inputs, outputs, microbatches, leaves=False)
    times = None if microbatches == 1 else times_of(annotated.graph, microbatches, solver_options(options))
    kinds, gradients = annotated.interface.kinds, range(outputs, len(returned_nodes(gm)))
    if times is None:
        whole_batch(outputs, gradients)(gm)
    else:
        decision = on_time_axis(on_one_device(annotated.graph), annotated.graph, times)
        to_microbatches(decision, ALONE.with_time(microbatches), outputs, gradients)(gm)
    table = schedule(options.schedule_name, options.stage_ranks, 1 if times is None else microbatches, options.virtual_stages)
    try:
        staged = stage_body(gm, kinds, cut_loop(gm), table.stages, cluster.device, lambda find: find())
    except TooFewParts as error:
        log.warning("%s goes through no stages, and each rank does all of it: %s", name, error.what)
        whole = annotate(copied(traced.gm), traced.inputs, outputs)
        record = plan_graph(whole, options.model_copy(update={"mesh": None}), one_rank_of(cluster), name=name).record
        return record.model_copy(update={"mesh": {"pp": options.stage_ranks}})
    plan = StagedPlan(traced.gm, traced.inputs, outputs, options, cluster, times)
    return plan.plan(name, gm, staged, table)
