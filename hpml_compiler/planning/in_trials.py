"""A plan under a byte budget: placements, each tried out on a copy of the graph, and what is kept by them for backward."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hpml_compiler.planning.bound import proven
from hpml_compiler.planning.plan_graph import Planned
from hpml_compiler.planning.remembered import Memory
from hpml_compiler.planning.trial import MOST_OF_THE_TIME, Trial
from hpml_compiler.planning.within_budget import within_budget
from hpml_compiler.plans.kept import KeptPlan
from passes.keeping.keys import KeptNodes
from passes.partition.lifetimes import Lifetimes
from passes.partition.meshes import Memos
from passes.solve.allowance import Allowance


def plan_in_trials(plan: Callable[..., Planned], trial: Trial, allowance: Allowance, pinned: KeptPlan | None = None,
                   ) -> Planned:
    """plan: `plan_graph` of the trial's graph, but for when bytes are counted, how many there may be, and how long it looks.
    allowance: for all of it. pinned: what a plan that is obeyed keeps. Raises Infeasible, with the smallest budget that is
    known to work."""
    sharing, plan = trial.sharing, partial(plan, memos=Memos())
    if pinned is not None and (planned := plan_as_pinned(plan, trial, allowance, pinned)) is not None:
        return planned

    def placed(lifetimes: Lifetimes, budget_bytes: float, part: Allowance) -> Planned:
        return _placed(plan, trial, lifetimes, budget_bytes, part)

    def try_out(planned: Planned) -> KeptNodes:
        return trial(planned, allowance.part(MOST_OF_THE_TIME * allowance.seconds))

    remedies = [] if sharing.options.offloads("saved") else ['offload="saved"']
    if sharing.options.resident_states and trial.cluster.device.kind == "cpu":  # on several GPUs that is refused
        remedies.append('offload="optimizer"')
    return within_budget(placed, try_out, sharing.budget, allowance, sharing.held_by_others, sharing.options.gap, remedies)


def remembered(memory: Memory, plan: Callable[..., Planned], trial: Trial | None = None, allowance: Allowance | None = None,
               ) -> Planned:
    """The plan of an earlier launch, if there is one that fits, else a new one. plan: as above; trial: where there is a
    budget. allowance: for a new one; the options' time limit if None."""
    within = allowance or Allowance(memory.options.time_limit)
    if trial is None:
        return memory.plan(lambda found: plan(as_in=found), lambda: plan(allowance=within), within)
    budgeted = memory.about(trial.sharing, trial.forward_outputs, trial.kept_gradients, sorted(trial.written), trial.device)
    return budgeted.plan(
        lambda found: plan_as_pinned(partial(plan, as_in=found), trial, within, found.kept) if found.kept else None,
        lambda: plan_in_trials(plan, trial, within), within)


def remembered_within(memory: Memory, plan: Callable[..., Planned], allowance: Allowance | None = None, **limits: Any,
                      ) -> Planned:
    """The same without a budget, by these limits in place of those of the plan: see `hpml_compiler.planning.fits`."""
    return remembered(memory.about(*limits.items()) if limits else memory, partial(plan, **limits), allowance=allowance)


def plan_as_pinned(plan: Callable[..., Planned], trial: Trial, allowance: Allowance, pinned: KeptPlan) -> Planned | None:
    """With what a plan keeps that is obeyed; None where that was made for another budget and does not fit this one."""
    sharing = trial.sharing
    planned = _placed(plan, trial, Lifetimes(0.0), sharing.budget - sharing.held_by_others, allowance)
    kept = trial.obey(planned, pinned)
    return None if kept is None else proven(replace(planned, kept=kept), planned, sharing.options.gap)


def _placed(plan: Callable[..., Planned], trial: Trial, lifetimes: Lifetimes, budget_bytes: float, allowance: Allowance,
            ) -> Planned:
    lifetimes = replace(lifetimes, made=trial.sharing.making.at_once)
    return plan(lifetimes=lifetimes, budget_bytes=budget_bytes, allowance=allowance)
