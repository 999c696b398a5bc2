"""How far a plan under a byte budget may be from the fastest: running again included.

Placements with none of the saved values counted are a relaxation: what is counted of them is held whatever is kept, namely
parameters, what is gathered of them and held, and the optimizer's state, all the time; and when backward is over, the
gradients and what the optimizer makes at once. So no plan within the budget takes less than their proven bound, on any mesh.
"""
from __future__ import annotations

from dataclasses import replace

from hpml_compiler.planner.graph.graph_planning import PlanResult


def with_gap(planned: PlanResult, relaxed: PlanResult | None, wanted_gap: float) -> PlanResult:
    """Its report with the bound of all there is, and how far from it this one is. relaxed: the answer with none of the saved
    values counted and the whole budget, of all meshes that this one might be on."""
    report, kept = planned.record.solver, planned.kept
    if report.cost is None or kept is None:
        return planned
    bound = bound_of(relaxed) if relaxed is not None else None
    if report.objective == "time":
        cost = report.cost + kept.again_us + kept.offload_us
        gap = None if bound is None else max(cost - bound, 0.0) / cost if cost else 0.0
        status = report.status if gap is None else "optimal" if gap <= wanted_gap else "feasible"
        report = report.model_copy(update={"cost": cost, "bound": bound, "gap": gap, "status": status})
    else:  # nothing says what energy running again takes
        report = report.model_copy(update={"bound": bound, "gap": None})
    return replace(planned, record=planned.record.model_copy(update={"solver": report}))


def bound_of(relaxed: PlanResult) -> float | None:
    """Of all its meshes together: one that was given up has a bound, too, unless nothing fits on it."""
    tried = [each for each in relaxed.rejected if each.cost is not None or each.bound is not None]
    bounds = [relaxed.record.solver.bound, *(each.bound for each in tried)]
    known = [each for each in bounds if each is not None]
    return min(known) if len(known) == len(bounds) else None
