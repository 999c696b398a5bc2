"""Plan for a heterogeneous cluster: divide the rows of the batch between groups of equal devices by predicted step time.

Each group is planned as a cluster of its own for the numbers of rows that the search for the best shares tries
(`passes.batch_balance.share_search`). See `hpml_compiler.plan_api.mixed_plan` for the resulting plan, and
`passes.cost_model.cross_group_allreduce` for the cost of the gradient all-reduce between groups.
"""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpml_compiler.instruments.heterogeneous.batch_slicing import batch_rows, first_rows
from hpml_compiler.options import Options
from hpml_compiler.plan_api.mixed_content import Alternative, CrossReduction, GroupShare, ShareAttempt
from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.traced_model import TracedModel
from passes.analyses.cross_sample_ops import mixing_operations
from passes.batch_balance.row_shares import step_us
from passes.batch_balance.share_search import search_shares
from passes.batch_balance.time_estimates import TimeEstimate
from passes.cost_model.cross_group_allreduce import mixed_energy_j, sum_between_groups_us
from passes.cost_model.energy_model import capped_cluster
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")

ONE = 1 / 3
"""Fraction of the remaining time limit for planning one group with one number of rows."""
TOLERANCE = 0.01
"""Relative gap: the search ends when no other shares can be faster by more than this."""


def plan_mixed(model: nn.Module, batch: Any, cluster: Cluster, options: Options, *, rows: Sequence[int] | None = None,
               ) -> MixedPlan:
    """Divide the rows of `batch` between the groups of `cluster`, and plan each group. rows: per group, pins the shares.

    Raises Infeasible if no shares fit, and BadInput for options that imply one mesh over all devices.
    """
    _check(options, cluster)
    planner = _GroupPlanner(model, batch, cluster, options)
    if rows is not None:
        return planner.pinned(tuple(rows))
    return planner.best()


def equal_rows(devices: Sequence[int], total: int) -> tuple[int, ...]:
    """Divide `total` rows in proportion to devices, where possible in multiples of each group's devices."""
    shares = [total * count / sum(devices) for count in devices]
    rows = [int(share) // count * count if share >= count else int(share)
            for share, count in zip(shares, devices, strict=True)]
    neediest = max(range(len(rows)), key=lambda g: shares[g] - rows[g])
    rows[neediest] += total - sum(rows)
    return tuple(rows)


def _check(options: Options, cluster: Cluster) -> None:
    if options.plan is not None:
        raise BadInput("a plan to obey was given for a cluster of several groups", "options['plan']",
                       "leave it out, or give a cluster of like devices")
    sizes = [group.size for group in cluster.groups]
    if options.mesh is not None and set(sizes) != {math.prod(options.mesh.values())}:
        raise BadInput(f"the mesh {options.mesh} has {math.prod(options.mesh.values())} devices, the groups have {sizes}",
                       "options['mesh']", "each group has a mesh of its own: pin one only where it fits all groups")


class _GroupPlanner:
    """Plans groups for given numbers of rows; each number of rows is traced once for all groups."""

    def __init__(self, model: nn.Module, batch: Any, cluster: Cluster, options: Options):
        self.began, self.allowance = time.perf_counter(), WorkLimit(options.time_limit)
        self.model, self.batch, self.cluster, self.options = model, batch, cluster, options
        self.total = batch_rows(batch)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.alone = [Cluster((group,)) for group in cluster.groups]
        self.traces: dict[int, TracedModel] = {}
        self.plans: dict[tuple[int, int], Plan] = {}
        self.attempts: list[ShareAttempt] = []
        self.estimates = [TimeEstimate(group.size, self.total) for group in cluster.groups]

    # -- planning groups -----------------------------------------------------------------------------------------------

    def ask(self, group: int, rows: int) -> float | None:
        """Step time in µs of a group with this number of rows; None if they do not fit. Updates the group's estimate."""
        if not self.estimates[group].knows(rows):
            self.estimates[group].learn(rows, self._plan(group, rows))
        return self.estimates[group].known.get(rows)

    def _plan(self, group: int, rows: int) -> float | None:
        if rows not in self.traces:
            options = self.options.model_copy(update={"cluster": self.options.cluster or str(self.cluster)})
            self.traces[rows] = TracedModel(self.model, first_rows(self.batch, rows), options)
        began = time.perf_counter()
        try:
            plan = plan_traces(self.traces[rows], self.alone[group], self.allowance.part(
                ONE * max(self.allowance.left_s, 0.0)))
        except Infeasible as error:
            self.attempts.append(ShareAttempt(group=group, rows=rows, step_time_us=None, peak_bytes=None, reason=error.what))
            return None
        self.plans[group, rows] = plan
        step_time_us = plan.predicted.step_time_us
        self.attempts.append(ShareAttempt(group=group, rows=rows, step_time_us=step_time_us, peak_bytes=plan.memory.peak))
        log.info("%s with %d rows: %.0f us, planned in %.1f s", self.alone[group], rows, step_time_us,
                 time.perf_counter() - began)
        return step_time_us

    def together_us(self, active: tuple[int, ...]) -> float:
        return sum_between_groups_us(self.cluster, active, self.gradient_bytes)

    # -- choosing shares -----------------------------------------------------------------------------------------------

    def best(self) -> MixedPlan:
        groups = range(len(self.alone))
        for group in groups:
            self.ask(group, self.total)
        equal = self._alternative(equal_rows([group.size for group in self.cluster.groups], self.total))
        single = min((self._alternative(tuple(self.total if g == group else 0 for g in groups)) for group in groups),
                     key=lambda other: math.inf if other.step_time_us is None else other.step_time_us)
        found = search_shares(self.estimates, self.together_us, self.ask, tolerance=TOLERANCE)
        if found.shares is None:
            raise self._nothing_fits()
        return self._record(found.shares.rows, found.bound_us, equal, single)

    def pinned(self, rows: tuple[int, ...]) -> MixedPlan:
        if len(rows) != len(self.alone) or sum(rows) != self.total or min(rows) < 0:
            raise BadInput(f"the shares {list(rows)} of a batch of {self.total} rows for {len(self.alone)} groups", "rows",
                           "give each group a number of rows, which add up to the batch")
        pinned = self._alternative(rows)
        if pinned.step_time_us is None:
            raise self._nothing_fits()
        return self._record(rows, pinned.step_time_us, None, None)

    def _alternative(self, rows: tuple[int, ...]) -> Alternative:
        missed = [group for group, count in enumerate(rows) if count and self.ask(group, count) is None]
        if missed:
            return Alternative(rows=rows, step_time_us=None, reason="; ".join(map(self._why_not, missed)))
        return Alternative(rows=rows, step_time_us=self._step_us(rows))

    def _step_us(self, rows: tuple[int, ...]) -> float:
        return step_us(rows, [estimate.known_table() for estimate in self.estimates], self.together_us)

    # -- reporting -----------------------------------------------------------------------------------------------------

    def _why_not(self, group: int) -> str:
        misses = [attempt for attempt in self.attempts if attempt.group == group and attempt.step_time_us is None]
        least = min(misses, key=lambda attempt: attempt.rows)
        return f"{self.alone[group]} with {least.rows} rows: {least.reason}"

    def _nothing_fits(self) -> Infeasible:
        groups = [group for group in range(len(self.alone)) if self.estimates[group].impossible]
        return Infeasible("no shares of the batch fit the memory of the groups", "; ".join(map(self._why_not, groups)),
                          "use more devices, a smaller batch, or raise memory_budget where it is below the device's memory")

    def _reason(self, group: int) -> str:
        if not any(attempt.group == group for attempt in self.attempts):
            return "it was given none"
        if not self.estimates[group].known:
            return f"it cannot hold the model: {self._why_not(group)}"
        return "it would save less time than adding up gradients with it takes"

    def _notes(self, rows: tuple[int, ...]) -> tuple[str, ...]:
        """Notes for the user: where results differ from those of one device, and which objective was minimized."""
        found = []
        traced = self.traces[max(rows)]
        graphs = [traced.shortened[1]] if traced.shortened else traced.whole
        mixing = [name for graph in graphs for name in mixing_operations(graph.graph)]
        if mixing and sum(1 for count in rows if count) > 1:
            named = ", ".join(mixing[:3]) + (f" and {len(mixing) - 3} more" if len(mixing) > 3 else "")
            found.append(f"{named} may read results over all rows of the batch (as BatchNorm does): each group takes those "
                         "over its own rows, which is not exactly what one device computes")
        if self.options.objective != "time":
            found.append(f"the plan of each group minimizes {self.options.objective}, the shares minimize time")
        return tuple(found)

    def _energy_j(self, rows: tuple[int, ...]) -> float | None:
        energies = [self.plans[g, count].predicted.energy_j if count else 0.0 for g, count in enumerate(rows)]
        times = [self.estimates[g].known[count] if count else 0.0 for g, count in enumerate(rows)]
        known = [energy for energy in energies if energy is not None]
        if len(known) < len(energies):
            return None
        return mixed_energy_j(self.cluster, known, times, self.gradient_bytes)

    def _record(self, rows: tuple[int, ...], bound_us: float, equal: Alternative | None, single: Alternative | None,
                ) -> MixedPlan:
        shares = tuple(
            GroupShare(cluster=str(self.alone[g]), devices=self.alone[g].world_size, rows=count,
                       fraction=count / self.total, step_time_us=self.estimates[g].known[count] if count else 0.0,
                       plan=self.plans[g, count] if count else None, reason="" if count else self._reason(g))
            for g, count in enumerate(rows)
        )
        active = tuple(g for g, count in enumerate(rows) if count)
        link = self.cluster.between_groups
        traced = {count: plan.graphs for (_, count), plan in self.plans.items()}  # once for all groups
        seconds = {phase: sum(graph.seconds.get(phase, 0.0) for graphs in traced.values() for graph in graphs)
                   for phase in ("trace", "annotate")}
        solve = sum(graph.seconds.get("solve", 0.0) for plan in self.plans.values() for graph in plan.graphs)
        return MixedPlan(
            torch_version=torch.__version__, world_size=self.cluster.world_size, cluster=str(self.cluster),
            hardware=capped_cluster(self.cluster, self.options.power_cap),
            options=self.options.to_json(), batch=self.total, groups=shares,
            cross=CrossReduction(groups=len(active), bytes=self.gradient_bytes if len(active) > 1 else 0,
                                 link=link.name if link else "", predicted_us=self.together_us(active)),
            estimated_bound_us=bound_us, energy_j=self._energy_j(rows), equal_split=equal, single_group=single,
            attempts=tuple(self.attempts), notes=self._notes(rows),
            seconds={**seconds, "solve": solve, "rewrite": 0.0, "total": time.perf_counter() - self.began},
        )
