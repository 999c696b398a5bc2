"""Plan under a memory budget: placements, each tried out on a copy of the graph, with checkpointing solved for each."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hpml_compiler.planner.graph.optimality_gap import with_gap
from hpml_compiler.planner.search.budget_search import first_within_budget, search_within_budget
from hpml_compiler.planner.search.dry_run import MOST_OF_THE_TIME, DryRun
from hpml_compiler.planner.search.plan_cache import PlanCache
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from passes.sharding.oracle.memory_model import MemoryModel
from passes.sharding.search.mesh_search import SearchTables
from passes.solver.work_limit import WorkLimit


def plan_by_trials(plan: Callable[..., PlanResult], trial: DryRun, allowance: WorkLimit,
                   pinned: CheckpointingPlan | None = None,
                   ) -> PlanResult:
    """Plan a graph by trials. plan: `plan_graph` of the trial's graph, without memory model, bytes and allowance. allowance:
    for the full search. pinned: checkpointing of a saved plan to apply. Raises Infeasible, with the smallest budget that is
    known to work."""
    sharing, plan = trial.sharing, partial(plan, memos=SearchTables())
    if pinned is not None and (planned := plan_as_pinned(plan, trial, allowance, pinned)) is not None:
        return planned

    def placed(lifetimes: MemoryModel, budget_bytes: float, part: WorkLimit) -> PlanResult:
        return _placed(plan, trial, lifetimes, budget_bytes, part)

    def try_out(planned: PlanResult) -> PlanResult:
        return trial(planned, allowance.part(MOST_OF_THE_TIME * allowance.seconds))

    if trial.step.hurried:
        return first_within_budget(placed, try_out, sharing.budget, allowance, sharing.other_graphs_bytes, sharing.options.gap)
    options = sharing.options
    remedies = [] if options.offloads("saved") else ['offload="saved"']
    on_cpu = trial.step.cluster.device.kind == "cpu"  # several GPUs do not support it
    if options.optimizer_states and not options.offloads("optimizer") and on_cpu:
        remedies.append('offload="optimizer"')
    if options.redundancy and on_cpu:
        remedies.append("redundancy=0")
    return search_within_budget(placed, try_out, sharing.budget, allowance, sharing.other_graphs_bytes, sharing.options.gap,
                                remedies)


def cached_or_new(memory: PlanCache, plan: Callable[..., PlanResult], trial: DryRun | None = None,
                  allowance: WorkLimit | None = None,
                  ) -> PlanResult:
    """The cached plan, if there is one that fits, else a new one. plan: as for `plan_by_trials`; trial: under a budget only.
    allowance: for a new plan; the options' time limit if None."""
    within = allowance or WorkLimit(memory.options.time_limit)
    if trial is None:
        return memory.plan(lambda found: plan(as_in=found), lambda: plan(allowance=within), within)
    step = trial.step
    budgeted = memory.about(step.sharing, step.outputs, step.kept_gradients, sorted(step.written), step.device)
    return budgeted.plan(
        lambda found: plan_as_pinned(partial(plan, as_in=found), replace(trial, repeats=found.repeats), within, found.kept)
        if found.kept else None,
        lambda: plan_by_trials(plan, trial, within), within)


def cached_or_new_within(memory: PlanCache, plan: Callable[..., PlanResult], allowance: WorkLimit | None = None, **limits: Any,
                         ) -> PlanResult:
    """`cached_or_new` without a budget, with limits that replace the plan's: see
    `hpml_compiler.planner.search.fitting_search`."""
    return cached_or_new(memory.about(*limits.items()) if limits else memory, partial(plan, **limits), allowance=allowance)


def plan_as_pinned(plan: Callable[..., PlanResult], trial: DryRun, allowance: WorkLimit,
                   pinned: CheckpointingPlan) -> PlanResult | None:
    """Apply the checkpointing of a saved plan, and the collectives that the trial is given; None where it was made for another
    budget and does not fit this one."""
    sharing = trial.sharing
    planned = _placed(plan, trial, MemoryModel(0.0), sharing.budget - sharing.other_graphs_bytes, allowance)
    obeyed = trial.obey(planned, pinned)
    return None if obeyed is None else with_gap(obeyed, planned, sharing.options.gap)


def _placed(plan: Callable[..., PlanResult], trial: DryRun, lifetimes: MemoryModel, budget_bytes: float, allowance: WorkLimit,
            ) -> PlanResult:
    share = None if lifetimes.saved_share is None else lifetimes.saved_share * trial.saved_part
    lifetimes = replace(lifetimes, saved_share=share, transient=trial.sharing.transient.at_once)
    return plan(lifetimes=lifetimes, budget_bytes=budget_bytes, allowance=allowance)
