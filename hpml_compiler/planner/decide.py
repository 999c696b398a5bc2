"""Decide everything about one step: what its microbatch loop contains, placements, pipeline stages, and saved activations.

A run and an offline plan call the same functions. They differ in the ranks: those of a run agree on each decision, and one of
its devices needs no placements, so that its plan is made on demand.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.checkpointing.checkpointing_choice import with_checkpointing
from hpml_compiler.planner.checkpointing.single_device_checkpointing import (
    checkpoint_single_device,
    given_checkpointing,
    keep_in_loop,
)
from hpml_compiler.planner.graph.gather_choice import GatherChoice, repeats_in
from hpml_compiler.planner.graph.graph_planning import solver_options
from hpml_compiler.planner.graph.microbatching import loop_of, loss_of, memory_model_in_time, microbatch_placement
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.pipeline.cut_plan import cut_plan_of, gather_choice_of, stage_search, unpipelined_search
from hpml_compiler.planner.pipeline.pp_axis import cluster_of_stage, devices_of_stage, is_split, options_of_stage, schedule_of
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.search.fitting_search import FittingSearch, check_fits, fits_replicated, memory_limit
from hpml_compiler.planner.search.placement_request import PlacementRequest
from hpml_compiler.planner.step_decision import DecidedStep, StepDecision, pinned_by
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from passes.checkpointing.pinned_recomputation import unmatched
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.graph.decision import MicrobatchPlacement
from passes.graph.graph_copy import copy_graph
from passes.graph.module_blocks import assign_blocks
from passes.sharding.loop_gathers import LoopGathers
from passes.transforms.shard.redistributor import MeshGroups

log = logging.getLogger("hpml")
T = TypeVar("T")
Search = Callable[[PlacementRequest], tuple[PlanResult, GraphPlan]]


class Ranks(Protocol):
    """The ranks that a step is decided for. size: their number. running: whether they run it; if not, a plan is made of it."""

    size: int
    running: bool

    def agreed(self, what: str, find: Callable[[], T]) -> T:
        """The result of rank 0, on every rank. what: for progress lines."""
        ...

    def place(self, request: PlacementRequest, search: Search) -> tuple[PlanResult, GraphPlan]:
        """The result of the search for this request, which the ranks may complete, on every rank."""
        ...


def decide(step: StepProblem, ranks: Ranks, strict: bool = True) -> DecidedStep:
    """Decide about a step. strict: raise an error where a budget cannot be met; False for a step that is compiled again for
    gradients at other outputs. Raises Infeasible, and TooFewBlocks where a graph cannot be pipelined."""
    times = None
    if step.microbatches > 1:
        find = partial(microbatch_placement, step.annotated.graph, step.microbatches, solver_options(step.options),
                       step.allowance)
        times = ranks.agreed("planning microbatches", find)
        if times is None and step.analyze_full is not None:
            step = replace(step, analyze=step.analyze_full, microbatches=1)
    if step.options.stage_ranks > 1:
        return _in_stages(step, ranks, times)
    if ranks.size == 1 and (ranks.running or step.sharing is not None):
        return _on_one_device(step, ranks, times, strict)
    return _on_devices(step, ranks, times)


def _on_one_device(step: StepProblem, ranks: Ranks, times: MicrobatchPlacement | None, strict: bool) -> DecidedStep:
    decision = StepDecision(microbatches=times, pinned=pinned_by(step.options))
    sharing = step.sharing
    if sharing is None:
        return DecidedStep(decision, step)
    _warn_unmatched(step)
    options, outputs, loop = step.options, step.outputs, None
    if not ranks.running:
        _checkpointing_of(options.load_plan(), step)
    pinned = given_checkpointing(options, lambda: step.graph_hash) if strict else None
    if times is None:
        find = partial(checkpoint_single_device, step.joint(), outputs, sharing, step.cluster, pinned, step.folded)
    else:
        gm = step.annotated.gm if ranks.running else copy_graph(step.annotated.gm)
        loop = loop_of(gm, step.annotated.graph, None, times, MeshGroups((), (), ()),
                       outputs, step.kept_gradients, options.compiler, chunks=options.chunks)
        find = partial(keep_in_loop, gm, loop, times.microbatches, outputs, sharing, step.cluster, pinned, step.folded, strict)
    kept = ranks.agreed("planning activation checkpointing", find)
    return DecidedStep(replace(decision, checkpointing=kept), step, loop=loop if ranks.running else None)


def _on_devices(step: StepProblem, ranks: Ranks, times: MicrobatchPlacement | None) -> DecidedStep:
    options = step.options
    given = options.load_plan()
    repeats = _repeats_of(given, step)
    trial = DryRun(step, times, repeats) if step.sharing is not None and step.forward_outputs is not None else None
    if trial is not None:
        _warn_unmatched(step)

    def finish(planned: PlanResult) -> GraphPlan:
        record = planned.record if step.folded is None else step.folded.of_all_layers(planned.record)
        if times is not None:
            choice = GatherChoice(record, step.annotated, times, step.cluster, options, repeats)
            limit = memory_limit(options, step.cluster)
            record = choice.within(limit)[1] if planned.repeats is None else choice.record_of(planned.repeats)
        return record if planned.checkpointing is None else with_checkpointing(record, planned.checkpointing, options)

    fitting = FittingSearch(options, step.cluster, finish, memory_model_in_time(times, loss_of(step.annotated.gm) is not None))
    request = PlacementRequest(step.annotated, options, step.cluster, step.name, step.fixed_mesh, step.rows,
                               given, folded=step.folded, times=times)
    planned, record = ranks.place(request, lambda request: request.place(
        step.allowance, fitting, trial, _checkpointing_of(given, step), hurried=ranks.running))
    gathers = repeats_in(record.microbatches, step.annotated.interface.names)
    decision = StepDecision(planned.mesh, planned.decision, times, gathers, checkpointing=planned.checkpointing,
                            pinned=pinned_by(options))
    return DecidedStep(decision, step, replace(planned, record=record), record)


def _in_stages(step: StepProblem, ranks: Ranks, times: MicrobatchPlacement | None) -> DecidedStep:
    """Decide the placements inside a stage, where it has several ranks. The stages are found in the loop that is cut out."""
    options, cluster, planned, given = step.options, step.cluster, None, step.options.load_plan()
    _checkpointing_of(given, step)
    repeats = _repeats_of(given, step)
    table = schedule_of(options, 1 if times is None else times.microbatches)
    if not ranks.running and options.schedule not in ("auto", "gpipe") and loss_of(step.annotated.gm) is None:
        log.warning("%s has no loss: with schedule=%r, backward begins after forward of all microbatches, as with 'gpipe', "
                    "until the script's loss is part of the step", step.name, options.schedule)
    finish = None if step.traced is None else cut_plan_of(step, times, repeats)

    def fits() -> bool:
        return finish is None or ranks.running and fits_replicated(step.annotated, options, cluster)

    record = None
    if is_split(options.mesh or {}):
        own, of_stage = options_of_stage(options), cluster_of_stage(cluster, options.stage_ranks)
        request = PlacementRequest(step.annotated, own, of_stage, step.name, step.fixed_mesh, step.rows, own.load_plan(),
                                   folded=step.folded)
        fitting = None if finish is None or fits() else stage_search(options, cluster, table, finish)
        planned, record = ranks.place(request, lambda request: request.place(step.allowance, fitting, hurried=ranks.running))
    elif finish is not None and not (ranks.running and step.sharing is not None):
        # One rank has no choice. Those of a run decide what they save once their stages are cut, and check it then.
        record = ranks.agreed("checking that the stages fit in memory",
                              lambda: None if fits() else check_fits(finish(None), options, cluster))
    gathers = None if record is None else repeats_in(record.microbatches, step.annotated.interface.names)
    if gathers is None and (choice := gather_choice_of(step, times, planned, repeats)) is not None:
        gathers = choice.given or choice.pinned
    decision = StepDecision(
        dict(options.mesh or {}), planned and planned.decision, times, gathers, table.name,
        None if finish is None else finish.stages, pinned=pinned_by(options))
    return DecidedStep(decision, step, planned, record, fullest=None if finish is None else finish.fullest)


def decide_unpipelined(step: StepProblem, ranks: Ranks) -> DecidedStep:
    """Decide about a graph that is not pipelined, beside others that are: the ranks of every stage run it in full. Raises
    Infeasible where it does not fit."""
    options, cluster = step.options, step.cluster
    own, of_stage = options_of_stage(options), devices_of_stage(cluster, options.stage_ranks)
    request = PlacementRequest(step.annotated, own, of_stage, step.name, step.fixed_mesh, step.rows, own.load_plan())
    search = lambda request: request.place(  # noqa: E731
        step.allowance, unpipelined_search(options, cluster), hurried=ranks.running)
    planned = record = None
    if is_split(options.mesh or {}) or not ranks.running:
        planned, record = ranks.place(request, search)
    elif step.forward_outputs is not None:
        ranks.agreed("checking that the step fits in memory",
                     lambda: fits_replicated(step.annotated, options, cluster) or search(request) and True)
    decision = StepDecision(dict(options.mesh or {}), planned and planned.decision, pinned=pinned_by(options))
    return DecidedStep(decision, step, planned, record)


def _warn_unmatched(step: StepProblem) -> None:
    """Warn of patterns of options['recompute'] that match no block of the graph."""
    pins = tuple(step.options.recompute.items())
    if all(how in ("auto", "none") and pattern == "*" for pattern, how in pins):
        return
    blocks = sorted({*assign_blocks(step.joint() if step.traced is not None else step.annotated.gm).values()} - {""})
    if not blocks and all(pattern == "*" for pattern, _ in pins):
        log.info("%s: the model has no repeated layers, so that options['recompute'] takes it as one block", step.name)
        return
    for pattern in unmatched(blocks, pins):
        log.warning("%s: the pattern %r of options['recompute'] matches none of its blocks: %s", step.name, pattern,
                    ", ".join(blocks[:8]) or "the model has no repeated layers")


def _repeats_of(given: Plan | None, step: StepProblem) -> LoopGathers | None:
    """Collectives of parameters that each microbatch repeats in the given plan."""
    graph = None if given is None else next((each for each in given.graphs if each.graph_hash == step.graph_hash), None)
    return None if graph is None else repeats_in(graph.microbatches, step.annotated.interface.names)


def _checkpointing_of(given: Plan | None, step: StepProblem) -> CheckpointingPlan | None:
    """Checkpointing of the given plan. Raises PlanMismatch where that is not a plan of this graph."""
    if given is None or not step.annotated.interface.training:
        return None
    return given.check(step.graph_hash, torch.__version__, step.cluster.world_size).kept


class OfflineRanks:
    """No ranks: a plan is made for those of a cluster. quick: see `plan_graph`."""

    running = False

    def __init__(self, size: int, quick: CachedMeasurements | None = None):
        self.size, self.quick = size, quick

    def agreed(self, what: str, find: Callable[[], T]) -> T:
        return find()

    def place(self, request: PlacementRequest, search: Search) -> tuple[PlanResult, GraphPlan]:
        return search(replace(request, quick=self.quick))
