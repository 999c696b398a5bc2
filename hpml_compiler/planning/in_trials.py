"""A plan under a byte budget: placements, each tried out on a copy of the graph, and what is kept by them for backward."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpml_compiler.planning.bound import proven
from hpml_compiler.planning.plan_graph import Planned
from hpml_compiler.planning.trial import Trial
from hpml_compiler.planning.within_budget import within_budget
from hpml_compiler.plans.kept import KeptPlan
from passes.partition.lifetimes import Lifetimes


def plan_in_trials(plan: Callable[..., Planned], trial: Trial, seconds: float, pinned: KeptPlan | None = None) -> Planned:
    """plan: `plan_graph` of the trial's graph, but for when bytes are counted, how many there may be, and how long it looks.
    seconds: for all of it. pinned: what a plan that is obeyed keeps. Raises Infeasible, with the smallest budget that is known
    to work."""
    sharing = trial.sharing

    def placed(lifetimes: Lifetimes, budget_bytes: float, time_limit: float) -> Planned:
        lifetimes = replace(lifetimes, made=sharing.making.at_once)
        return plan(lifetimes=lifetimes, budget_bytes=budget_bytes, time_limit=time_limit)

    if pinned is not None:
        planned = placed(Lifetimes(0.0), sharing.budget - sharing.held_by_others, seconds)
        if (kept := trial.obey(planned, pinned)) is not None:
            return proven(replace(planned, kept=kept), planned, sharing.options.gap)
    remedies = [] if sharing.options.offloads("saved") else ['offload="saved"']
    if sharing.options.resident_states and trial.cluster.device.kind == "cpu":  # on several GPUs that is refused
        remedies.append('offload="optimizer"')
    return within_budget(placed, trial, sharing.budget, seconds, sharing.held_by_others, sharing.options.gap, remedies)
