"""Search for a plan that fits, over everything that the options leave open: mesh, stages, microbatches and recomputation.

Placements of the whole batch, with everything saved and no limit on saved bytes, give each mesh a lower bound, and an estimate
of every configuration on it. Configurations are planned in the order of these estimates, like pinned ones; those whose bound or
estimate is above the best plan so far are not. The search ends when none is left, or with the work limit.
"""
from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.joint.open_decisions import KEPT_OF_ALL, JointCandidate, OpenDecisions, StageCost
from hpml_compiler.planner.offline_planner import plan_candidate
from hpml_compiler.planner.pipeline.pp_axis import cluster_of_stage
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.schema import MeshAttempt
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.errors import BadInput, Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.oracle.memory_model import MemoryModel
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
OF_ONE = 0.5
"""Part of the work limit for planning one configuration."""
MOST_UNLIKELY = 3
"""Configurations on a number of stages that are planned although their estimate does not fit."""
LATER = 0.25
"""Part of the work limit for placements of the whole batch, over all meshes."""


@dataclass
class JointSearch:
    """traces: with known traces, of one graph. annotated: the whole batch at once, of a few layers if `folded` says how many
    more there are. refusal: why planning without these decisions failed."""

    traces: TracedModel
    decisions: OpenDecisions
    annotated: AnalyzedGraph
    folded: FewLayerTrace | None
    refusal: Infeasible
    allowance: WorkLimit
    best: tuple[float, Plan, JointCandidate] | None = None
    least: Infeasible | None = None
    rejected: list[MeshAttempt] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        return self.decisions.cluster

    def run(self) -> Plan:
        """The fastest plan that was found. Raises Infeasible."""
        for stages in self.decisions.stage_counts():
            if stages > 1 and (self.best is not None or self.allowance.is_over):
                break
            self._plan_all(sorted(self._candidates(stages), key=lambda each: (not each.may_fit, each.us)))
        if self.best is None:
            raise self._refused()
        return self._reported(*self.best)

    def _plan_all(self, candidates: list[JointCandidate]) -> None:
        for number, candidate in enumerate(candidates):
            if self.best is not None and candidate.bound_us >= self.best[0]:
                self._reject(candidate, "its bound is above the best plan")
            elif self.best is not None and candidate.us >= self.best[0]:
                self._reject(candidate, "its estimate is above the best plan")
            elif self.best is not None and self.allowance.is_over or self.allowance.left_s < -self.allowance.seconds:
                self._reject(candidate, "time_limit was over before it was planned")
            elif not candidate.may_fit and number >= MOST_UNLIKELY:
                self._reject(candidate, f"it would take about {format_bytes(candidate.bytes_with(KEPT_OF_ALL))}")
            else:
                self._plan(candidate)

    def _plan(self, candidate: JointCandidate) -> None:
        options = candidate.options(self.traces.options)
        part = self.allowance.part(OF_ONE * self.allowance.seconds)
        try:
            plan = plan_candidate(self.traces.with_options(options), self.cluster, part)
        except Infeasible as error:
            if error.smallest_budget_bytes is not None and (
                    self.least is None or error.smallest_budget_bytes < (self.least.smallest_budget_bytes or math.inf)):
                self.least = error
            self._reject(candidate, error.what)
            return
        except (BadInput, DepthsDiffer, LayersDiffer) as error:
            self._reject(candidate, error.what if isinstance(error, BadInput) else "a few layers do not represent the model")
            return
        if plan.memory.peak > candidate.limit:
            self._reject(candidate, f"it takes {format_bytes(plan.memory.peak)}")
            return
        us = plan.predicted.step_time_us
        log.info("%s on the mesh %s: %s a step, %s", candidate, candidate.mesh, format_us(us), format_bytes(plan.memory.peak))
        if self.best is None or us < self.best[0]:
            if self.best is not None:
                self._reject(self.best[2], "dearer", self.best[0])
            self.best = (us, plan, candidate)
        else:
            self._reject(candidate, "dearer", us)

    def _reject(self, candidate: JointCandidate, reason: str, us: float | None = None) -> None:
        log.info("rejected: %s on the mesh %s, %s", candidate, candidate.mesh, reason)
        self.rejected.append(MeshAttempt(mesh=candidate.mesh, cost=us, bound=candidate.bound_us,
                                         reason=f"{candidate}: {reason}"))

    def _candidates(self, stages: int) -> Iterator[JointCandidate]:
        limit = memory_limit(self.traces.options, self.cluster)
        for mesh in self.decisions.stage_meshes(stages):
            cost = self._cost(stages, mesh)
            if cost is not None:
                yield from (JointCandidate(stages, cost, count, limit) for count in self.decisions.microbatch_counts(mesh)
                            if stages == 1 or count >= stages)

    def _cost(self, stages: int, mesh: dict[str, int]) -> StageCost | None:
        """Placements of the whole batch on the ranks of a stage; None where their parameters alone do not fit."""
        options, folded = self.traces.options, self.folded
        cluster = cluster_of_stage(self.cluster, stages)
        own = options.model_copy(update={"mesh": mesh or None, "memory_budget": None, "microbatches": 1, "recompute": {}})
        part = self.allowance.part(LATER * self.allowance.seconds)
        try:
            planned = plan_graph(self.annotated, own, cluster, lifetimes=MemoryModel(0.0), allowance=part,
                                 budget_bytes=stages * memory_limit(options, self.cluster),
                                 shorter=None if folded is None else folded.shorter,
                                 further=0 if folded is None else folded.further)
        except Infeasible as error:
            self.least = self.least or error
            return None
        except DepthsDiffer:
            return None
        record = planned.record
        bound = record.solver.bound
        state = (2 + options.resident_states) * sum(self.traces.trained.values()) / cluster.world_size
        largest = max((nbytes for each in record.operations.values() for nbytes in each.result_bytes), default=0)
        return StageCost(mesh, record.predicted.step_time_us, 0.0 if bound is None else bound,
                         state, float(record.memory.activations), float(largest), self._whole_bytes())

    def _whole_bytes(self) -> float:
        graph = self.annotated.graph
        return float(sum(graph.values[graph.outputs[each.number][0]].bytes for each in self.annotated.interface.unread))

    def _reported(self, us: float, plan: Plan, candidate: JointCandidate) -> Plan:
        """The plan with the bound over all configurations that were considered."""
        bounds = [us, *(each.bound for each in self.rejected if each.bound is not None)]
        bound, gap = min(bounds), 1.0 - min(bounds) / us if us else 0.0
        optimal = gap <= self.traces.options.gap
        graphs = tuple(graph.model_copy(update={"solver": graph.solver.model_copy(update={
            "status": "optimal" if optimal else "feasible", "cost": us, "bound": bound, "gap": gap})}) for graph in plan.graphs)
        log.info("nothing was pinned: hpml chose the mesh %s, %s; it is at most %.1f %% above the bound of %s", candidate.mesh,
                 candidate, 100 * gap, format_us(bound))
        return plan.model_copy(update={"graphs": graphs, "rejected": tuple(self.rejected)})

    def _refused(self) -> Infeasible:
        """The error where nothing fits, with a memory that is known to be enough where planning without a search found one."""
        known = self.refusal if self.refusal.smallest_budget_bytes is not None else self.least or self.refusal
        error = Infeasible(f"no configuration of mesh, stages, microbatches and recomputation was found to fit (of "
                           f"{len(self.rejected)}): {known.what}", self.refusal.where, known.next_step)
        error.smallest_budget_bytes, error.plan = known.smallest_budget_bytes, known.plan
        return error
