"""Trace a model once, in full or as a few of its equal layers, and plan it on clusters of equal devices."""
from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.few_layer_trace import (
    LONG,
    SHORT,
    FewLayerTrace,
    depth,
    neighbors,
    repeated_paths,
    with_few_layers,
)
from hpml_compiler.planner.graph.graph_planning import PlanResult, plan_graph, solver_options
from hpml_compiler.planner.graph.microbatch_estimate import in_time
from hpml_compiler.planner.graph.microbatching import (
    fitting_microbatches,
    joint_of_loss,
    loss_of,
    memory_model_in_time,
    microbatch_placement,
)
from hpml_compiler.planner.graph.plan_assembly import as_plan
from hpml_compiler.planner.offline_budget import OfflineBudget
from hpml_compiler.planner.pipeline.offline_pipeline import plan_folded, plan_in_stages
from hpml_compiler.planner.search.budget_trials import cached_or_new_within
from hpml_compiler.planner.search.fitting_search import FittingSearch
from hpml_compiler.planner.search.plan_cache import plan_cache_of
from hpml_compiler.plans.schema import GraphPlan, UnplannedPart
from hpml_compiler.runtime.process.gc_pause import gc_paused
from passes.checkpointing.layer_boundary import LayersDiffer
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_copy import copy_graph
from passes.graph.graph_signature import input_position
from passes.hardware.cluster import Cluster
from passes.presets import annotate
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.grouping.layer_removal import without_layers
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.sharding.oracle.memory_model import MemoryModel
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace, trace
from passes.tracing.named_passes import run_named_passes
from passes.tracing.untraced_parts import UntracedPart

log = logging.getLogger("hpml")


class TracedModel:
    """A model that is traced on one batch when first needed, and then planned on one cluster after another. alone: trace it as
    for one device. run_breaks: run the Python code between graphs, on the real weights and batch."""

    def __init__(self, model: nn.Module, batch: Any, options: Options, alone: bool = False, run_breaks: bool = False):
        self.model, self.batch, self.options, self.alone, self.run_breaks = model, batch, options, alone, run_breaks
        self.unplanned: list[UntracedPart] = []
        """Filled when the full model is traced."""

    @cached_property
    def traced(self) -> list[JointTrace]:
        """All graphs of the full model, under a budget before any pass of hpml's own."""
        found = trace(self.model, self.batch, self.options.compiler, self.alone, self.run_breaks, self.unplanned)
        for each in found:
            run_named_passes(self.options.passes, each.gm)
        return found

    @cached_property
    def whole(self) -> list[AnalyzedGraph]:
        """All graphs, analyzed for planning."""
        return [self._annotated(each) for each in self.traced]

    @property
    def trained(self) -> dict[str, float]:
        """Bytes of the trained parameters, by name."""
        return {name: float(p.numel() * p.element_size()) for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def shortened(self) -> tuple[FewLayerTrace, AnalyzedGraph] | None:
        """Four layers of a deep model, and their relation to it; None if that is not worth it."""
        layers = depth(self.model)
        if layers is None or self.options.trace_all_layers or self.options.plan is not None:
            return None
        long = self._cut(LONG)
        if long is None:
            return None
        self.few, annotated = long
        short = without_layers(annotated.graph, neighbors(self.model))
        if short is None:
            log.info("the layers of the model are not that much alike that one could be left out: tracing fewer, too")
            fewer = self._cut(SHORT)
            if fewer is None:
                return None
            short, seconds = fewer[1].graph, fewer[1].seconds
            annotated.seconds = {k: annotated.seconds[k] + seconds[k] for k in seconds}
        names = tuple(name for name, _ in self.model.named_parameters())
        return FewLayerTrace(short, tuple(repeated_paths(self.model)), layers, names), annotated

    def _cut(self, layers: int) -> tuple[JointTrace, AnalyzedGraph] | None:
        """Trace the model with so many layers, under a budget also before any pass; None if that gives several graphs."""
        with with_few_layers(self.model, layers):
            found = trace(self.model, self.batch, self.options.compiler)
        for each in found:
            run_named_passes(self.options.passes, each.gm)
        return (found[0], self._annotated(found[0])) if len(found) == 1 and not found[0].breaks else None

    def _annotated(self, traced: JointTrace) -> AnalyzedGraph:
        budget = self.options.memory_budget is not None
        return _annotate(replace(traced, gm=copy_graph(traced.gm)) if budget else traced, self.options)


@gc_paused()
def plan_traces(traces: TracedModel, cluster: Cluster, allowance: WorkLimit | None = None) -> Plan:
    """Plan a traced model on a cluster of equal devices. allowance: replaces the options' time limit. Raises BadInput and
    Infeasible."""
    options = traces.options
    allowance = allowance or WorkLimit(options.time_limit)
    options.check_mesh(cluster.world_size)
    if options.stage_ranks > 1:
        return _with_unplanned(as_plan(_plan_stages(traces, options, cluster, allowance), [], options, str(cluster)), traces)
    given = options.load_plan()
    results = _plan_shortened(traces, options, cluster, allowance)
    if results is None:
        results = _plan_whole(traces, options, cluster, given, allowance)
    rejected = [attempt for result in results for attempt in result.rejected]
    return _with_unplanned(as_plan([result.record for result in results], rejected, options, str(cluster)), traces)


def _with_unplanned(plan: Plan, traces: TracedModel) -> Plan:
    sizes = {name: p.numel() for name, p in traces.model.named_parameters()}
    return plan.model_copy(update={"unplanned": tuple(
        UnplannedPart(reason=each.reason, where=each.where, parameters=each.parameters,
                      elements=sum(sizes[name] for name in each.parameters)) for each in traces.unplanned)})


def _plan_stages(traces: TracedModel, options: Options, cluster: Cluster, allowance: WorkLimit) -> list[GraphPlan]:
    if traces.shortened is not None:
        folded, annotated = traces.shortened
        count = _microbatches(annotated)
        try:
            return [plan_folded(folded, annotated, traces.few.forward_outputs, options, cluster, count, "graph_0", allowance)]
        except DepthsDiffer:
            log.info("the layers of the model are not alike: tracing all of them")
    results = []
    for number, each in enumerate(traces.traced):
        part = allowance.part(max(allowance.left_s, 0.0) / (len(traces.traced) - number))
        results.append(plan_in_stages(each, options, cluster, _fitting(each, options), f"graph_{number}", part))
    return results


def _annotate(traced: JointTrace, options: Options) -> AnalyzedGraph:
    count = 1
    if options.microbatches > 1:
        traced = replace(traced, gm=joint_of_loss(traced.gm))
        count = _fitting(traced, options)
    annotated = annotate(traced.gm, traced.inputs, traced.forward_outputs, count)
    annotated.seconds["trace"] = traced.seconds
    return annotated


def _fitting(traced: JointTrace, options: Options) -> int:
    """Number of microbatches for its rows."""
    return fitting_microbatches(_shapes_of_batch(traced), options.microbatches, (options.mesh or {}).get("dp", 1))


def _shapes_of_batch(traced: JointTrace) -> list[torch.Size]:
    """Shapes of the inputs of the joint graph that are data."""
    given = [node for node in traced.gm.graph.find_nodes(op="placeholder") if not node.name.startswith("tangents")]
    return [node.meta["val"].shape for order, node in enumerate(given) if isinstance(node.meta.get("val"), torch.Tensor)
            and traced.inputs[input_position(node, order)].kind == "batch"]


def _plan_whole(traces: TracedModel, options: Options, cluster: Cluster, given: Plan | None,
                allowance: WorkLimit) -> list[PlanResult]:
    results: list[PlanResult] = []
    budgeted = OfflineBudget(options, cluster, traces.trained, given) if options.memory_budget is not None else None
    for number, annotated in enumerate(traces.whole):
        name, mesh = f"graph_{number}", results[0].mesh if results else None
        part = allowance.part(max(allowance.left_s, 0.0) / (len(traces.whole) - number))
        if budgeted is not None:
            budgeted.allowance = part
            times, _ = _in_time(annotated, options, part)
            results.append(budgeted.plan(name, traces.traced[number], annotated, mesh, times=times))
        else:
            if given is not None:
                given.check(annotated.hash(), torch.__version__, cluster.world_size)
            times, lifetimes = _in_time(annotated, options, part)
            plan = partial(plan_graph, annotated, options, cluster, name=name, fixed_mesh=mesh)
            if given is not None:
                search = partial(plan, given=given, allowance=part)
            else:
                search = partial(cached_or_new_within, plan_cache_of(annotated, options, cluster, None, mesh), plan, part)
            finish = lambda planned, of=annotated, times=times: in_time(planned.record, of, times, cluster, options)  # noqa: E731
            planned, record = FittingSearch(options, cluster, finish, lifetimes)(search)
            results.append(replace(planned, record=record))
    return results


def _plan_shortened(traces: TracedModel, options: Options, cluster: Cluster, allowance: WorkLimit) -> list[PlanResult] | None:
    """Plan a deep model from traces of three and four of its layers; None if that is not sound or not worth it."""
    if traces.shortened is None:
        return None
    folded, annotated = traces.shortened
    try:
        if options.memory_budget is not None:
            try:
                budgeted = OfflineBudget(options, cluster, traces.trained, allowance=allowance)
                times, _ = _in_time(annotated, options, allowance)
                return [budgeted.plan("graph_0", traces.few, annotated, None, folded, times)]
            except LayersDiffer:
                log.info("of %d equal layers, %d were traced, which a rank does not run alike: all saved values are counted as "
                         "if none could be computed once more; with trace_all_layers=True it is decided what is kept",
                         folded.layers, LONG)
        memory = plan_cache_of(annotated, options, cluster, None, folded.further)
        times, lifetimes = _in_time(annotated, options, allowance)
        plan = partial(plan_graph, annotated, options, cluster, name="graph_0", shorter=folded.shorter,
                       further=folded.further)

        def finish(planned: PlanResult) -> GraphPlan:
            return in_time(folded.of_all_layers(planned.record), annotated, times, cluster, options)

        search = partial(cached_or_new_within, memory, plan, allowance)
        planned, record = FittingSearch(options, cluster, finish, lifetimes)(search)
        return [replace(planned, record=record)]
    except DepthsDiffer:
        log.info("the layers of the model are not alike: tracing all of them")
        return None


def _in_time(annotated: AnalyzedGraph, options: Options, allowance: WorkLimit) -> tuple[MicrobatchPlacement | None,
                                                                                        MemoryModel]:
    """Placements on the microbatch axis, where the options and the rows allow microbatches, and the memory model."""
    count = _microbatches(annotated)
    times = None if count == 1 else microbatch_placement(annotated.graph, count, solver_options(options), allowance)
    return times, memory_model_in_time(times, loss_of(annotated.gm) is not None)


def _microbatches(annotated: AnalyzedGraph) -> int:
    """Number of microbatches that it was analyzed for."""
    return next((value.factors[dim][factor] for value in annotated.graph.values for dim, factor in value.microbatch), 1)
