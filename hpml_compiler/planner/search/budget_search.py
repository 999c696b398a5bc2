"""Placements under a byte budget where what is not kept can be computed once more: plan, try it out, and plan again.

The placement problem counts bytes at two moments (`passes.sharding.oracle.memory_model`) and does not know what computing again
takes. What a rank really holds, and what has to run once more for it, is known of the rewritten graph alone. So placements
are found with none of the saved values counted, then with all of them, or with a part, and with less for them if what comes
out holds too much. Each answer is rewritten as a trial, and it is decided what its graph keeps. The fastest that fits is taken.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpml_compiler.planner.graph.graph_planning import PlanResult
from hpml_compiler.planner.graph.optimality_gap import with_gap
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.checkpointing.layer_boundary import LayersDiffer
from passes.errors import Infeasible
from passes.sharding.oracle.memory_model import MemoryModel
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
WHERE = "options['memory_budget']"
SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)
"""Parts of the saved values that count, one after another as long as no placements are found."""
MOST_TRIALS = 6
LONGER = 0.5
"""Part of the time limit that is spent besides before a budget is refused."""
LEAST = 1 / 15
"""Part of the time limit for one solve, however little is left."""
LITTLE = 0.005
"""Running again that takes no more than this part of a step is no reason to look for other placements."""

Plan = Callable[[MemoryModel, float, WorkLimit], PlanResult]
TryOut = Callable[[PlanResult], CheckpointDecision]


def search_within_budget(plan: Plan, try_out: TryOut, budget_bytes: float, allowance: WorkLimit, others_bytes: float = 0.0,
                         wanted_gap: float = 0.0, remedies: Sequence[str] = ()) -> PlanResult:
    """plan: placements by these lifetimes within so many bytes, found within an allowance, which raises Infeasible where there
    are none. try_out: what is kept by them, with a `budget_bytes` that parameters, optimizer state and what other graphs of the
    step hold leave; of the latter, `others_bytes` are known beforehand. Another plan is looked for until the allowance is
    over, which few searches need: MOST_TRIALS ends them. wanted_gap: to the bound, at which it counts as optimal.

    Raises Infeasible, with the smallest budget that is known to work, where no trial fits, and LayersDiffer where none could be
    tried out; remedies: what may help then, besides the usual.
    """
    search = _BudgetSearch(plan, try_out, budget_bytes, allowance)
    bytes_left = budget_bytes - others_bytes
    first = search.look(0.0, bytes_left)
    if first is not None and _excess(first) <= 0 and _again_us(first) <= LITTLE * first.record.predicted.step_time_us:
        return with_gap(first, first, wanted_gap)
    shares = list(SHARES)
    longer_s = LONGER * allowance.seconds
    while shares and len(search.tried) <= MOST_TRIALS and allowance.left_s > (0 if search.fitting() else -longer_s):
        latest = search.look(shares[0], bytes_left)
        if latest is None:  # so many saved values fit nowhere, but some of them need not be kept
            del shares[0]
        elif _excess(latest) <= 0:
            break
        else:
            bytes_left -= _excess(latest)
    if allowance.is_over:
        log.info("the search for placements within the budget was cut short by time_limit after %d trials: with more time it "
                 "may find faster ones", len(search.tried))
    if not search.fitting():
        search.look_for_the_least()
    return with_gap(search.best(remedies, others_bytes), first, wanted_gap)


class _BudgetSearch:
    def __init__(self, plan: Plan, try_out: TryOut, budget_bytes: float, allowance: WorkLimit):
        self.plan, self.try_out, self.budget_bytes, self.allowance = plan, try_out, budget_bytes, allowance
        self.tried: list[PlanResult] = []
        self.refusal: Infeasible | LayersDiffer | None = None
        self.least_bytes: float | None = None
        """With which the latest placements that were refused would have been found."""
        self.least: PlanResult | None = None

    def look(self, share: float, bytes_left: float) -> PlanResult | None:
        """Placements by this share of the saved values, tried out; None where there are none."""
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
                same = replace(planned, kept=self.try_out(planned))
            except LayersDiffer as refusal:
                self.refusal = refusal  # by other placements, layers that stand for others may be alike
                return None
            self.tried.append(same)
            log.info("%s: mesh %s in %s holds %s, %s of which to run once more or to move", same.record.name, same.mesh,
                     format_us(_us(same)), format_bytes(_held(same)), format_us(_again_us(same)))
        return same

    def look_for_the_least(self) -> None:
        """Whatever it takes: as little as can be held of parameters and their state. No budget has led there, so that every
        search that finds nothing else finds this."""
        self.least = self.look(0.0, 0.0)
        if self.least is None and self.least_bytes is not None:
            self.least = self.look(0.0, self.least_bytes)

    def to_name(self, others_bytes: float) -> PlanResult:
        """The closest of those that do not fit; another where a search with as many bytes as that holds would not find it."""
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
        """The fastest that fits. Else what is named works: one that a search with as many bytes finds, too."""
        fitting = self.fitting()
        if fitting:
            return min(fitting, key=_us)
        if not self.tried:
            assert self.refusal is not None, "nothing was tried because nothing was found"
            raise self.refusal
        closest = self.to_name(others_bytes)
        least = self.budget_bytes + _excess(closest)
        stepping = _kept(closest).after_bytes == _kept(closest).peak_bytes
        when = ", while the optimizer makes its step" if stepping else ""
        parts = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in _parts(closest).items() if nbytes)
        error = Infeasible(
            f"whatever is computed once more, the step holds {format_bytes(least)} at least{when}, and the budget is "
            f"{format_bytes(self.budget_bytes)}; of these bytes, {parts}", WHERE,
            ", or ".join([f"give {int(least) + 1} bytes or more", "fewer rows", "more devices", *remedies]) +
            ("; an optimizer with foreach=False or fused=True makes less meanwhile" if stepping else ""))
        error.smallest_budget_bytes = least
        raise error


def _kept(planned: PlanResult) -> CheckpointDecision:
    assert planned.kept is not None, "it was tried out"
    return planned.kept


def _again_us(planned: PlanResult) -> float:
    """What running again takes, and moving what is offloaded."""
    return _kept(planned).again_us + _kept(planned).offload_us


def _us(planned: PlanResult) -> float:
    return planned.record.predicted.step_time_us + _again_us(planned)


def _excess(planned: PlanResult) -> float:
    """Bytes above what it was to hold at most."""
    return _kept(planned).peak_bytes - _kept(planned).budget_bytes


def _parts(planned: PlanResult) -> dict[str, float]:
    """Bytes by part when most is held."""
    kept, memory = _kept(planned), planned.record.memory
    account = kept.account
    state = {"parameters and optimizer state": memory.parameters + memory.optimizer}
    if kept.after_bytes == kept.peak_bytes:
        return {**state, "gradients": account.gradient_bytes}
    return {**state, **(account.forward if kept.forward_bytes == kept.peak_bytes else account.backward).parts}


def _held(planned: PlanResult) -> float:
    memory = planned.record.memory
    return memory.parameters + memory.optimizer + _kept(planned).peak_bytes
