"""Search for configurations of a graph of a run, on rank 0: where it does not fit as its options say, first without stages,
then with them; where these pin a part of the mesh, the rest of it; and where prices are measured, stages and microbatches that
are faster."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hpml_compiler.planner.captured_model import CapturedModel
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.plan_assembly import as_plan
from hpml_compiler.planner.joint.chosen_configuration import ChosenConfiguration
from hpml_compiler.planner.joint.joint_objective import FoundPlan
from hpml_compiler.planner.joint.joint_search import JointSearch
from hpml_compiler.planner.joint.open_decisions import described_pins
from hpml_compiler.planner.joint.open_planner import GAIN, joint_search_of
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.simulator import simulate
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from passes.sharding.oracle.memory_model import MemoryModel
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")


def search_graph(captured: CapturedModel, cluster: Cluster, refusal: Infeasible | None) -> tuple[ChosenConfiguration, ...]:
    """Configurations that fit, the fastest first; those with stages only where no other fits. refusal: why the graph does not
    fit as its options say; None where these pin a part of the mesh. Raises BadInput and Infeasible; that is `refusal` where
    the options leave nothing open."""
    options, search = captured.options, joint_search_of(captured, cluster, refusal)
    if refusal is None:
        if search is None or not search.decisions.has_meshes:
            options.check_mesh(cluster.world_size)
        why = f"since the options pin {described_pins(options)} and leave the rest open"
        log.info("the options pin %s; hpml searches over the rest", described_pins(options))
    elif search is None:
        raise refusal
    else:
        why = f"since placements alone do not fit ({refusal.what})"
        log.info("placements alone do not fit: %s; hpml searches over microbatches, recomputation and stages", refusal.what)
    assert search is not None, "a mesh that is pinned in part is refused"
    _run(search)
    return _chosen(search, search.found, why, refusal is None)


def faster_configurations(captured: CapturedModel, cluster: Cluster, record: GraphPlan) -> tuple[ChosenConfiguration, ...]:
    """Configurations with stages, or with microbatches that leave less to recompute, whose simulated step is shorter than that
    of this plan without them by `GAIN` or more, the fastest first. None where prices are not measured, ranks share a CPU, or
    energy is minimized."""
    options = captured.options
    if options.objective != "time" or not _are_measured(captured, cluster, record.graph_hash):
        return ()
    now_us = simulate(as_plan([record], (), options, cluster)).step_us
    recomputes = record.predicted.again_us >= GAIN * now_us and "microbatches" not in options.model_fields_set
    if options.mesh is not None and not recomputes:
        return ()
    what = "stages and microbatches gain" if recomputes else "stages gain"
    most_us, least_us = (1.0 - GAIN) * now_us, _least_us(captured, cluster)
    if least_us > most_us:
        log.info("%s less than %.0f %%: computation takes at least %s of %s a step on any number of them", what, 100 * GAIN,
                 format_us(least_us), format_us(now_us))
        return ()
    search = joint_search_of(captured, cluster)
    if search is None:
        return ()
    search.decisions, search.below = replace(search.decisions, pipelined=None if recomputes else True), most_us
    try:
        if {*search.decisions.stage_counts()}:
            search.run()
    except Infeasible as error:
        log.info("%s less than %.0f %%, or do not fit: %s", what, 100 * GAIN, error.what)
    found = [each for each in search.found if each.simulated_us <= most_us]
    return _chosen(search, found, f"since the step takes {format_us(now_us)} without them, by measured prices")


def _are_measured(captured: CapturedModel, cluster: Cluster, graph_hash: str) -> bool:
    """True if kernels and collectives of these devices were measured, and each rank has its own."""
    if captured.options.power_cap is not None or cluster.device.kind == "cpu" and measured_costs.local_ranks() > 1:
        return False
    prices = measured_costs.load(captured.options, cluster, graph_hash)
    return prices is not None and prices.collectives is not None and bool(
        prices.measurements.operations or prices.measurements.factors)


def _least_us(captured: CapturedModel, cluster: Cluster) -> float:
    """The computation of one device that runs the whole batch, spread evenly: kernels are not faster in parts."""
    (annotated,), size = captured.whole, cluster.world_size
    one = Cluster((replace(cluster.group, nodes=1, devices_per_node=1),))
    budget = size * memory_limit(captured.options, cluster)
    own = captured.options.model_copy(update={
        "mesh": None, "memory_budget": budget, "microbatches": 1, "recompute": {}, "schedule": "auto", "virtual_stages": 1})
    predicted = plan_graph(annotated, own, one, lifetimes=MemoryModel(0.0), budget_bytes=budget,
                           allowance=WorkLimit(own.time_limit)).record.predicted
    return (predicted.compute_us + predicted.optimizer_us) / size


def _run(search: JointSearch) -> None:
    decisions = search.decisions
    if not {*decisions.stage_counts()} > {1}:
        search.run()
        return
    try:
        search.decisions = replace(decisions, pipelined=False)
        search.run()
    except Infeasible:
        search.decisions, search.allowance = replace(decisions, pipelined=True), WorkLimit(search.traces.options.time_limit)
        search.run()


def _chosen(search: JointSearch, plans: Sequence[FoundPlan], why: str, fits: bool = False) -> tuple[ChosenConfiguration, ...]:
    """The fastest first. fits: where nothing is recomputed, a configuration comes without a memory budget first, as pinned."""
    found = list[ChosenConfiguration]()
    for each in sorted(plans, key=lambda each: each.cost):
        made = _configuration(search, each, why)
        if fits and made.memory_budget is not None and not any(graph.predicted.again_us for graph in each.plan.graphs):
            found.append(made.model_copy(update={"memory_budget": None}))
        found.append(made)
    return tuple(found)


def _configuration(search: JointSearch, found: FoundPlan, why: str) -> ChosenConfiguration:
    candidate, given = found.candidate, search.traces.options
    made = candidate.options(given)
    # With the loss outside, all forwards run first on any schedule; once it is part of the step, the default is better.
    named = candidate.stages > 1 and search.decisions.at_once
    outside = "" if named or candidate.stages == 1 else (
        "; backward begins after all forwards, as with 'gpipe', until the script's loss is part of the step")
    budget = made.memory_budget if given.memory_budget is None else None
    assert budget is None or isinstance(budget, int), "it is a device's memory in bytes"
    on = f" on the mesh {candidate.mesh}" if candidate.mesh else ""
    return ChosenConfiguration(
        mesh=candidate.mesh or None, microbatches=candidate.microbatches, memory_budget=budget,
        schedule=candidate.schedule.name if named else None, virtual_stages=candidate.schedule.virtual_stages if named else 1,
        reason=f"{candidate}{on}, with {format_bytes(found.plan.memory.peak)} of {format_bytes(candidate.limit)} and "
               f"{format_us(found.simulated_us)} a step as predicted, {why}{outside}",
        rejected=tuple(search.rejected))
