"""Plan one graph: run the placement passes and record their result as a `GraphPlan`."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.planner.graph.same_structure import Pins, SavedDecisions, decisions_of, reused_status
from hpml_compiler.plans.from_decision.graph_record import SHORTENED, graph_plan
from hpml_compiler.plans.peak_memory import copies_bytes
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import MeshAttempt, Objective
from passes.annotations import drop, read
from passes.cost_model.energy_model import capped_cluster
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import BadInput, Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.cluster import Cluster
from passes.hardware.gradient_compression import steps_apart
from passes.json_records import FrozenMap
from passes.presets import deciding
from passes.replicas.replica_gradients import check_replicas
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.sharding.search.mesh_placement import MeshPlacement
from passes.sharding.search.mesh_search import SearchConfig, SearchTables
from passes.sharding.search.placement_passes import SEARCH_RESULT
from passes.sharding.search.search_objective import SearchObjective
from passes.sharding.strategies.zero_levels import ZeroRules
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")


def solver_options(options: Options) -> SolverOptions:
    return SolverOptions(options.solver, options.time_limit, options.gap, extra=FrozenMap(options.solver_options))


def zero_of(options: Options, obeys: bool) -> ZeroRules:
    """How parameters may be stored and gathered. Unsharded parameters stay in memory with zero=1 or 2; with "auto" they may
    under a memory budget, or if the plan to apply has such parameters (obeys)."""
    if options.zero == "auto":
        return ZeroRules(None, holds=obeys or options.memory_budget is not None)
    level = 2 if options.zero == 1 else options.zero
    return ZeroRules(level, holds=level == 2)


def plan_graph(
    annotated: AnalyzedGraph, options: Options, cluster: Cluster, *, fixed_mesh: Mapping[str, int] | None = None,
    name: str = "graph", rows: frozenset[str] = frozenset(), given: Plan | None = None,
    shorter: PlacementGraph | None = None, further: int = 0, like: SavedDecisions | None = None,
    as_in: SavedDecisions | None = None,
    quick: CachedMeasurements | None = None, lifetimes: MemoryModel = STEP_PEAK, budget_bytes: float | None = None,
    allowance: WorkLimit | None = None, memos: SearchTables | None = None,
    inspect: Callable[[MeshPlacement, SolverOptions], None] | None = None, objective: SearchObjective | None = None,
) -> PlanResult:
    """Try every candidate mesh and keep the cheapest answer.

    A mesh whose bound is above the best answer so far is dropped without an answer. `like`: the plan of a graph of the
    same structure (`hpml_compiler.planner.graph.same_structure`), whose decisions are reused where they fit; `as_in`: a plan of
    the graph itself, whose decisions are reused, and raise an error where they do not fit. `quick`: quick profile to scale
    costs with, where there is no other profile. `lifetimes`: when bytes are counted; `budget_bytes`, `allowance`: replace the
    options' budget and time limit; `memos`: tables of earlier calls that differ in these three alone; `inspect`: sees the
    answer with its problem; `objective`: replaces the options'. Raises Infeasible if no mesh meets the budget, with the
    smallest budget that any meets.
    """
    capped = capped_cluster(cluster, options.power_cap)
    if budget_bytes is None:
        budget_bytes = options.budget_bytes(capped.device.memory_bytes)
    conditions = SearchConfig(
        capped, objective or options.objective, budget_bytes, options.optimizer_states,
        measured=_measured(annotated, options, capped, name, quick, full_speed=capped == cluster),
        solver=solver_options(options), zero=zero_of(options, _holds(given or options.load_plan())),
        rows=rows, weights=options.row_weights, shorter=shorter, further=further, lifetimes=lifetimes,
        resident_states=options.resident_states, memos=memos, allowance=allowance or WorkLimit(options.time_limit),
        compression=options.axis_compression,
        local_ranks=None if options.cluster is not None or not dist.is_initialized() else measured_costs.local_ranks(),
    )

    def planned(mesh: Mapping[str, int] | None, pins: Pins | None) -> PlanResult:
        deciding(conditions, mesh, pins)(annotated.gm)
        if inspect is not None:
            inspect(read(SEARCH_RESULT, annotated.gm).placed, conditions.solver)
        return _with_copies(_result(annotated, conditions, name), options, capped)

    if as_in is not None:
        return _as_like(as_in, planned(as_in.mesh, decisions_of(as_in)))
    if like is not None and given is None and (fixed_mesh is None or [*fixed_mesh.items()] == [*like.mesh.items()]):
        try:
            return _as_like(like, planned(like.mesh, decisions_of(like)))
        except (BadInput, Infeasible) as refusal:  # sizes that an axis does not divide, or more bytes than the budget
            log.info("the decisions of %s do not fit this graph of the same structure; hpml solves it separately: %s",
                     like.name, refusal.what)
    mesh = fixed_mesh or options.mesh
    if not mesh and (obeyed := given or options.load_plan()) is not None:
        mesh = obeyed.mesh
    return planned(mesh, _pins(given, annotated, shorter is not None))


def _as_like(like: SavedDecisions, planned: PlanResult) -> PlanResult:
    """Mark in the solver's report that the decisions are another plan's, without a bound."""
    solver = planned.record.solver.model_copy(update={"status": reused_status(like), "bound": None, "gap": None})
    return replace(planned, record=planned.record.model_copy(update={"solver": solver}))


def _measured(annotated: AnalyzedGraph, options: Options, cluster: Cluster, name: str, quick: CachedMeasurements | None,
              full_speed: bool,
              ) -> CachedMeasurements | None:
    measured = measured_costs.load(options, cluster, annotated.hash()) or quick
    if measured is not None and not full_speed:
        log.warning("%s: measured costs are for full speed; under the power cap of %g W, roofline costs are used", name,
                    options.power_cap)
        return None
    return measured


def _result(annotated: AnalyzedGraph, conditions: SearchConfig, name: str) -> PlanResult:
    """The result of the search, which the passes attach to the graph, as a plan."""
    answer = read(SEARCH_RESULT, annotated.gm)
    if conditions.compression and annotated.interface.training and not any(
            axis.compression for axis in answer.placed.decision.axes):
        what, example = ("replicas do not train apart", '{"local_steps": {"dp": 8}}') if any(
            map(steps_apart, conditions.compression.values())) else (
            "gradients are not compressed", '{"compress": {"dp": "bf16"}}')
        log.warning("%s: %s: no axis of the mesh %s crosses nodes; name an axis, as in options=%s", name, what, answer.mesh,
                    example)
    check_replicas(annotated.graph, answer.placed.decision)
    drop(SEARCH_RESULT, annotated.gm)  # the problem in it is large, and not needed any more
    record = graph_plan(
        annotated, answer.mesh, answer.placed, name=name, seconds={**annotated.seconds, "solve": answer.seconds},
        shortened=conditions.shorter is not None, objective=_reported(conditions), energy_j=answer.energy_j,
        prices=conditions.prices(answer.mesh))
    rejected = tuple(
        MeshAttempt(mesh=dict(zip(each.mesh.names, each.mesh.shape)), cost=each.cost, bound=each.bound,
                    reason=each.reason, objective=_reported(conditions))
        for each in answer.rejected)
    return PlanResult(dict(zip(answer.mesh.names, answer.mesh.shape)), answer.placed.decision, record, rejected)


def _with_copies(planned: PlanResult, options: Options, cluster: Cluster) -> PlanResult:
    """The plan with the bytes of copies for `redundancy` in its memory, where that is the host's. cluster: of all ranks, or of
    those that share a stage, since each stage has its own parameters."""
    record = planned.record
    if not options.redundancy or cluster.device.kind != "cpu" or not record.training:
        return planned
    stored = sum(each.bytes_per_device for each in record.parameters.values())
    layers = record.memory.parameters / stored if record.multiplicity and stored else 1.0  # of which a few are listed
    copies = round(layers * copies_bytes(record.parameters.values(), options.optimizer_states,
                                         options.redundancy, cluster.world_size))
    memory = record.memory.model_copy(update={"copies": copies, "peak": record.memory.peak + copies})
    return replace(planned, record=record.model_copy(update={"memory": memory}))


def _reported(conditions: SearchConfig) -> Objective:
    return "time" if conditions.objective == "time" else "energy"


def _holds(given: Plan | None) -> bool:
    return given is not None and any(each.held for graph in given.graphs for each in graph.parameters.values())


def _pins(given: Plan | None, annotated: AnalyzedGraph, shortened: bool) -> Pins | None:
    if given is None:
        return None
    digest = (SHORTENED if shortened else "") + annotated.hash()
    for graph in given.graphs:
        if graph.graph_hash == digest:
            return decisions_of(graph)
    return None
