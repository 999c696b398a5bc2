"""Optimality gap of a plan under a memory budget, including recomputation time.

Placements that count no saved values are a relaxation: all that they count is in memory whatever is saved. That is parameters,
unsharded parameters that are held, and optimizer state all the time; and when backward is over, gradients and the temporary
memory of the optimizer. So no plan within the budget takes less time than their proven bound, on any mesh.
"""
from __future__ import annotations

from dataclasses import replace

from hpml_compiler.plans.plan_result import PlanResult


def with_gap(planned: PlanResult, relaxed: PlanResult | None, wanted_gap: float) -> PlanResult:
    """The plan with the bound of the relaxation in its report, and its gap. relaxed: the answer that counts no saved values and
    has the full budget, over all meshes that this plan might be on."""
    report, kept = planned.record.solver, planned.checkpointing
    if report.cost is None or kept is None:
        return planned
    bound = bound_of(relaxed) if relaxed is not None else None
    if report.objective == "time":
        cost = report.cost + kept.recompute_us + kept.offload_us
        gap = None if bound is None else max(cost - bound, 0.0) / cost if cost else 0.0
        status = report.status if gap is None else "optimal" if gap <= wanted_gap else "feasible"
        report = report.model_copy(update={"cost": cost, "bound": bound, "gap": gap, "status": status})
    else:  # the energy of recomputation is unknown
        report = report.model_copy(update={"bound": bound, "gap": None})
    return replace(planned, record=planned.record.model_copy(update={"solver": report}))


def bound_of(relaxed: PlanResult) -> float | None:
    """Bound over all meshes together: a mesh that was given up has one, too, unless nothing fits on it."""
    tried = [each for each in relaxed.rejected if each.cost is not None or each.bound is not None]
    bounds = [relaxed.record.solver.bound, *(each.bound for each in tried)]
    known = [each for each in bounds if each is not None]
    return min(known) if len(known) == len(bounds) else None
