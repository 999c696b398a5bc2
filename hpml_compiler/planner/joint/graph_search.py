"""Search for configurations of a graph of a run that does not fit as its options say: first without stages, then with them."""
from __future__ import annotations

import logging
from dataclasses import replace

from hpml_compiler.planner.captured_model import CapturedModel
from hpml_compiler.planner.joint.chosen_configuration import ChosenConfiguration
from hpml_compiler.planner.joint.joint_search import FoundPlan, JointSearch
from hpml_compiler.planner.joint.open_planner import joint_search_of
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")


def search_graph(captured: CapturedModel, cluster: Cluster, refusal: Infeasible) -> tuple[ChosenConfiguration, ...]:
    """Configurations that fit, the fastest first; those with stages only where no other fits. Raises Infeasible; that is
    `refusal` where the options leave nothing open."""
    search = joint_search_of(captured, cluster, refusal)
    if search is None:
        raise refusal
    log.info("placements alone do not fit: %s; hpml searches over microbatches, recomputation and stages", refusal.what)
    _run(search)
    found = sorted(search.found, key=lambda each: each.simulated_us)
    return tuple(_chosen(search, each, refusal) for each in found)


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


def _chosen(search: JointSearch, found: FoundPlan, refusal: Infeasible) -> ChosenConfiguration:
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
               f"{format_us(found.simulated_us)} a step as predicted, since placements alone do not fit ({refusal.what})"
               f"{outside}",
        rejected=tuple(search.rejected))
