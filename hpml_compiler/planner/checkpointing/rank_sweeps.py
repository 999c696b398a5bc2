"""Activation checkpointing of several pipeline stages of one rank: each is decided beside the others, in sweeps."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, equal_shares
from hpml_compiler.planner.checkpointing.checkpointing_choice import WHERE
from hpml_compiler.visualize.formatting import format_bytes
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.errors import Infeasible
from passes.solver.work_limit import WorkLimit

MOST_SWEEPS = 3
"""Limit of sweeps over the stages of a rank, each decided beside the others as they were decided last."""
MOST_TIGHTER = 3
"""Smaller budgets that are tried out where the sweeps end above the budget."""
MOST_BUDGETS = 8
"""Budgets that are tried out before a refusal names one."""


@dataclass(frozen=True)
class RankSweeps:
    """problem_of: the problem of a stage, given the bytes that one microbatch saves in the other stages. in_flight: most
    microbatches that a stage has saved values of. more_bytes: added to the memory budget."""

    name: str
    stages: Sequence[int]
    problem_of: Callable[[int, Mapping[int, int]], CheckpointProblem]
    in_flight: Mapping[int, int]
    options: Options
    allowance: WorkLimit | None
    more_bytes: int = 0

    def problem(self, stage: int, saved: Mapping[int, int]) -> CheckpointProblem:
        found, more = self.problem_of(stage, saved), self.more_bytes
        share = replace(found.share, budget=found.share.budget + more, available=found.share.available + more)
        return replace(found, share=share)

    def decided(self) -> tuple[CheckpointDecision, ...]:
        """The decisions for the stages, in order, whether they fit or not. Where they do not, those of a smaller one may."""
        found = self._counted(self._swept())
        excess = _excess(found)
        for attempt in range(MOST_TIGHTER):
            if all(kept.fits for kept in found):
                break
            less = 2 ** attempt * excess
            tighter = self._counted(replace(self, more_bytes=self.more_bytes - less)._swept())
            found = min(found, tighter, key=_excess)
        return found

    def _swept(self) -> dict[int, CheckpointDecision]:
        saved = equal_shares(self.stages, lambda k: self.problem(k, {}), self.options)
        decisions = dict[int, CheckpointDecision]()
        for _ in range(MOST_SWEEPS):
            for k in self.stages:
                problem = self.problem(k, saved)
                decisions[k] = problem.solved(self.options, False, self.allowance)
                saved[k] = decisions[k].saved_bytes // self.in_flight[k]
            if all(kept.fits for kept in self._counted(decisions)):
                break
        return decisions

    def _counted(self, decisions: Mapping[int, CheckpointDecision]) -> tuple[CheckpointDecision, ...]:
        """The decisions, with their memory beside each other."""
        saved = {k: each.saved_bytes // self.in_flight[k] for k, each in decisions.items()}
        return tuple(self.problem(k, saved).recounted(decisions[k]) for k in self.stages)

    def strictly_decided(self) -> tuple[CheckpointDecision, ...]:
        """The decisions, which fit. Raises Infeasible, with a budget under which they do: since what a stage saves depends on
        the others, that is found by trying."""
        kept = found = self.decided()
        more = attempt = 0
        while not all(each.fits for each in kept) and attempt < MOST_BUDGETS:
            more += 2 ** attempt * _excess(kept)
            larger, attempt = replace(self, more_bytes=more), attempt + 1
            kept = larger._counted(larger._swept())
        if not more:
            return found
        budget = self.problem(self.stages[0], {}).share.budget
        error = Infeasible(
            f"{self.name}, stages {', '.join(map(str, self.stages))}: the step needs at least {format_bytes(budget + more)}, "
            f"whatever is recomputed, more than the budget of {format_bytes(budget)}", WHERE,
            f"set memory_budget to {budget + more} bytes, or use fewer rows or more devices")
        error.smallest_budget_bytes = budget + more
        raise error


def _excess(decisions: Sequence[CheckpointDecision]) -> int:
    """Bytes by which the highest peak exceeds the budget."""
    return math.ceil(max(each.peak_bytes - each.budget_bytes for each in decisions))
