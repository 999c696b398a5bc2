"""Search for placements under a memory budget with activation checkpointing: plan, try out, and plan again.

The placement problem counts bytes at two moments (`passes.sharding.oracle.memory_model`) and does not know the cost of
recomputation. Real memory and recomputation are known only for the rewritten graph. So placements are found that count no saved
values, then all of them or a part, and with a smaller budget if the result uses too much memory. Each answer is rewritten as a
trial, for which checkpointing is solved. The fastest that fits is taken.
"""
from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from hpml_compiler.planner.graph.optimality_gap import with_gap
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.errors import Infeasible
from passes.sharding.oracle.memory_model import MemoryModel
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
WHERE = "options['memory_budget']"
SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)
"""Shares of the saved values to count, tried in order until placements are found."""
MOST_TRIALS = 6
LONGER = 0.5
"""Part of the time limit that may be spent in addition before a budget is refused."""
LEAST = 1 / 15
"""Part of the time limit for one solve, however little is left."""
LOOKS = ((1.0, 0.95), (0.5, 0.7), (0.3, 0.6), (0.1, 0.5), (0.0, 0.05))
"""For one of many candidates: shares of the saved values to count, each with the part of the bytes that these and the state of
the parameters may take: the rest is left to what is saved in spite of recomputation, and to temporary values."""
LITTLE = 0.005
"""Recomputation that takes no more than this part of a step is no reason to search for other placements."""

Plan = Callable[[MemoryModel, float, WorkLimit], PlanResult]
TryOut = Callable[[PlanResult], PlanResult]


def search_within_budget(plan: Plan, try_out: TryOut, budget_bytes: float, allowance: WorkLimit, others_bytes: float = 0.0,
                         wanted_gap: float = 0.0, remedies: Sequence[str] = ()) -> PlanResult:
    """plan: finds placements for a memory model, a number of bytes and an allowance, or raises Infeasible where there are none.
    try_out: adds their checkpointing, solved with a `budget_bytes` that is the memory left by parameters, optimizer state and
    other graphs of the step; of the latter, `others_bytes` are known beforehand. The search goes on until the allowance is
    over, which few searches need: MOST_TRIALS ends them. wanted_gap: gap to the bound at which a plan counts as optimal.

    Raises Infeasible, with the smallest budget that is known to work, where no trial fits, and LayersDiffer where none could be
    tried out; remedies: additional remedies for the error.
    """
    search = _BudgetSearch(plan, try_out, budget_bytes, allowance)
    bytes_left = budget_bytes - others_bytes
    first = search.look(0.0, bytes_left)
    if first is not None and _excess(first) <= 0 and (
            _again_us(first) + first.repeats_us <= LITTLE * first.record.predicted.step_time_us):
        return with_gap(first, first, wanted_gap)
    shares = list(SHARES)
    longer_s = LONGER * allowance.seconds
    while shares and len(search.tried) <= MOST_TRIALS and allowance.left_s > (0 if search.fitting() else -longer_s):
        latest = search.look(shares[0], bytes_left)
        if latest is not None and _excess(latest) <= 0:
            break
        if latest is None or bytes_left <= 0:  # so many saved values fit nowhere, but some of them may be recomputed
            del shares[0]
        else:
            bytes_left -= _excess(latest)
    if allowance.is_over:
        log.info("time_limit stopped the search for placements within the budget after %d trials; with more time it may find "
                 "faster ones", len(search.tried))
    if not search.fitting():
        search.look_for_the_least()
    return with_gap(search.best(remedies, others_bytes), first, wanted_gap)


def first_within_budget(plan: Plan, try_out: TryOut, budget_bytes: float, allowance: WorkLimit, others_bytes: float = 0.0,
                        wanted_gap: float = 0.0) -> PlanResult:
    """The first placements of a few that fit with their checkpointing, as far as the allowance goes: `search_within_budget` for
    one of many candidates."""
    search = _BudgetSearch(plan, try_out, budget_bytes, allowance)
    for number, (share, part) in enumerate(LOOKS):
        if number and allowance.is_over:
            break
        found = search.look(share, part * (budget_bytes - others_bytes))
        if found is not None and _excess(found) <= 0:
            return with_gap(found, None, wanted_gap)
    return search.best((), others_bytes)


class _BudgetSearch:
    def __init__(self, plan: Plan, try_out: TryOut, budget_bytes: float, allowance: WorkLimit):
        self.plan, self.try_out, self.budget_bytes, self.allowance = plan, try_out, budget_bytes, allowance
        self.tried: list[PlanResult] = []
        self.refusal: Infeasible | LayersDiffer | None = None
        self.least_bytes: float | None = None
        """Bytes that the latest placements that were refused would need."""
        self.least: PlanResult | None = None

    def look(self, share: float, bytes_left: float) -> PlanResult | None:
        """Find and try out placements that count this share of the saved values; None where there are none."""
        try:
            part = self.allowance.part(max(self.allowance.left_s / 2, LEAST * self.allowance.seconds))
            planned = self.plan(MemoryModel(share), max(bytes_left, 0.0), part)
        except Infeasible as refusal:
            self.refusal = self.refusal or refusal
            self.least_bytes = refusal.smallest_budget_bytes
            return None
        same = next((each for each in self.tried if (each.mesh, each.decision) == (planned.mesh, planned.decision)), None)
        if same is None:
            try:
                same = self.try_out(planned)
            except LayersDiffer as refusal:
                self.refusal = refusal  # with other placements, the layers may be equal
                return None
            self.tried.append(same)
            log.info("%s: mesh %s takes %s and %s, including %s of recomputation and offloading", same.record.name, same.mesh,
                     format_us(_us(same)), format_bytes(_held(same)), format_us(_again_us(same)))
        return same

    def look_for_the_least(self) -> None:
        """Find placements with the least memory for parameters and their state, at any cost. They do not depend on the budget,
        so every search that finds nothing else finds them."""
        self.least = self.look(0.0, 0.0)
        if self.least is None and self.least_bytes is not None:
            self.least = self.look(0.0, self.least_bytes)

    def to_name(self, others_bytes: float) -> PlanResult:
        """The closest placements that do not fit, or the least if a search with the closest's bytes would not find these."""
        closest = min(self.tried, key=_excess)
        bytes_left = self.budget_bytes + _excess(closest) - others_bytes
        if self.least is None or _excess(self.least) <= _excess(closest):
            return closest
        found = (self.look(share, bytes_left) for share in (0.0, SHARES[0]))
        again = any(each is not None and _excess(each) <= _excess(closest) for each in found)
        return closest if again else self.least

    def fitting(self) -> list[PlanResult]:
        return [each for each in self.tried if _excess(each) <= 0]

    def best(self, remedies: Sequence[str], others_bytes: float) -> PlanResult:
        """The fastest placements that fit. If none do, raises an error with a budget for which the same search succeeds."""
        fitting = self.fitting()
        if fitting:
            return min(fitting, key=_us)
        if not self.tried:
            assert self.refusal is not None, "no trial and no refusal"
            raise self.refusal
        closest = self.to_name(others_bytes)
        least = math.ceil(self.budget_bytes + _excess(closest))
        stepping = _kept(closest).after_bytes == _kept(closest).peak_bytes
        when = ", during the optimizer step" if stepping else ""
        parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in _parts(closest).items() if nbytes)
        error = Infeasible(
            f"the step needs at least {format_bytes(least)}{when}, whatever is recomputed, more than the budget of "
            f"{format_bytes(self.budget_bytes)}; at the peak: {parts}", WHERE,
            ", or ".join([f"set memory_budget to {least} bytes or more", "use fewer rows or more devices",
                          *remedies]) +
            ("; an optimizer with foreach=False or fused=True needs less temporary memory" if stepping else ""))
        error.smallest_budget_bytes = least
        raise error


def _kept(planned: PlanResult) -> CheckpointDecision:
    assert planned.checkpointing is not None, "it was tried out"
    return planned.checkpointing


def _again_us(planned: PlanResult) -> float:
    """Time for recomputation and offloading, in µs."""
    return _kept(planned).recompute_us + _kept(planned).offload_us


def _us(planned: PlanResult) -> float:
    return planned.record.predicted.step_time_us + _again_us(planned) + planned.repeats_us


def _excess(planned: PlanResult) -> float:
    """Bytes above the budget."""
    return _kept(planned).peak_bytes - _kept(planned).budget_bytes


def _parts(planned: PlanResult) -> dict[str, float]:
    """Bytes by part at the peak."""
    kept, memory = _kept(planned), planned.record.memory
    account = kept.account
    state = {"parameters and optimizer state": memory.parameters + memory.optimizer,
             "copies of these": memory.copies}
    if kept.after_bytes == kept.peak_bytes:
        return {**state, "gradients": account.gradient_bytes}
    return {**state, **(account.forward if kept.forward_bytes == kept.peak_bytes else account.backward).parts}


def _held(planned: PlanResult) -> float:
    memory = planned.record.memory
    return memory.parameters + memory.optimizer + memory.copies + _kept(planned).peak_bytes
