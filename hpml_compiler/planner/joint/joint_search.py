"""Search for a plan that fits, over everything that the options leave open: mesh, stages, microbatches, schedule and
recomputation.

Placements of the whole batch, with everything saved and no limit on saved bytes, give an estimate of every configuration, on
their mesh and on others with the same tensor axis. Configurations are planned in the order of these estimates, like pinned
ones; each plan corrects the estimates of configurations like it. Those whose estimate is above the simulated step of the best
plan so far are not planned. The search ends when none is left, or with the work limit. Of the plans that fit, the one whose
simulated step takes the least time, or energy, is the answer. In the end, meshes whose bounds are the lowest are placed, too,
which raises these.
"""
from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.joint.joint_candidate import KEPT_OF_ALL, JointCandidate
from hpml_compiler.planner.joint.joint_objective import FoundPlan, JointObjective
from hpml_compiler.planner.joint.mesh_costs import MeshCosts
from hpml_compiler.planner.joint.open_decisions import OpenDecisions
from hpml_compiler.planner.joint.search_refusal import SearchRefusal
from hpml_compiler.planner.joint.stage_cost import StageCost
from hpml_compiler.planner.offline_planner import plan_candidate
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.schema import MeshAttempt
from hpml_compiler.visualize.formatting import format_bytes
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.errors import BadInput, Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.simulation.rank_lanes import CONTENTION
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
OF_ONE = 0.5
"""Part of the work limit for planning one configuration."""
LEFT = 0.1
"""Part of the work limit that has to be left for planning another configuration where one fits: all of it for slow ones."""
MOST_UNLIKELY = 3
"""Configurations that are planned although their estimate does not fit."""
MOST_PLANNED = 4
"""Configurations that are planned after the first one that fits."""
LATER = 0.05
"""Part that is added to the estimate of a loop over microbatches, once more for stages, and twice for a whole batch that
recomputes, where these wait for others to be planned: they take several times as long to plan."""
MOST_OFF = 1.15
"""Ratio of a simulated step to its estimate up to which other schedules on its mesh are expected to take as much longer. Above
it, the plan is an exception, such as one that repeats gathers for lack of memory."""
FOR_BOUNDS = 0.75
"""Multiple of the work limit for placements that only raise the bound."""
AGAIN, MOST_AGAIN = 2.0, 3
"""Multiple of the work limit for configurations that were refused when their part of it was over, and their number."""


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
    found: list[FoundPlan] = field(default_factory=list)
    least: Infeasible | None = None
    rejected: list[MeshAttempt] = field(default_factory=list)
    skipped: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict)
    """Places in `rejected` of configurations that were not planned, by mesh."""
    of_meshes: MeshCosts = field(init=False)
    cut_short: list[tuple[JointCandidate, str]] = field(default_factory=list)
    """Configurations that were refused when their part of the work limit was over, with the reason."""
    unplanned: int = 0
    """Number of configurations that the work limit left."""
    considered: list[JointCandidate] = field(default_factory=list)
    """All configurations, in the order of their estimates."""
    refused: dict[tuple[tuple[str, int], ...], float] = field(default_factory=dict)
    """Least estimated bytes of configurations that were planned and do not fit, by mesh."""
    ratios: dict[Hashable, float] = field(default_factory=dict)
    """Simulated step over estimate of the latest plans that are alike (see `_likeness`), on a mesh without recomputation."""
    below: float = math.inf
    """Cost of a known plan: only what may be cheaper is planned."""
    objective: JointObjective = field(init=False)

    def __post_init__(self) -> None:
        self.objective = JointObjective.of(self.traces.options.objective, self.cluster, self.traces.options.power_cap)
        self.of_meshes = MeshCosts(self.traces, self.annotated, self.folded, self.cluster, self.allowance.seconds)

    @property
    def cluster(self) -> Cluster:
        return self.decisions.cluster

    @property
    def best(self) -> FoundPlan | None:
        return min(self.found, key=lambda each: each.cost, default=None)

    def run(self, proves: bool = False) -> Plan:
        """The fastest plan that was found. proves: raise the bound in the end, which a run does not show. Raises Infeasible,
        and DepthsDiffer where a few layers do not represent the model on any mesh."""
        candidates = self.candidates()
        if not candidates and self.of_meshes.differs is not None:
            raise self.of_meshes.differs
        self.allowance = WorkLimit(self.allowance.seconds)  # its CPU time begins now
        self._plan_all(candidates)
        if self.best is None:
            raise self._refused()
        if proves:
            self._raise_bounds()
        return self._reported(self.best)

    def candidates(self) -> list[JointCandidate]:
        """All configurations, in the order of their estimates."""
        found = sorted(self._candidates(), key=self._order)
        self.considered += found
        return found

    def _order(self, candidate: JointCandidate) -> tuple[bool, bool, float]:
        slow = candidate.in_loop + (candidate.stages > 1) if candidate.in_loop else 2 * candidate.recomputes
        return not candidate.may_fit, candidate.takes_long, self._expected(candidate) * (1 + LATER * slow)

    def _expected(self, candidate: JointCandidate, at_best: bool = False) -> float:
        """The estimated cost, corrected by what a plan on the same mesh took. at_best: other schedules may have cost it more
        than they cost this one."""
        alike, family = _likeness(candidate)
        ratio = self.ratios.get(family, 1.0)
        ratio = self.ratios.get(alike, min(ratio, 1.0) if at_best else ratio)
        us = max(candidate.us * ratio, candidate.bound_us)
        return max(self.objective.expected(candidate, us), self.objective.bound(candidate))

    def _plan_all(self, candidates: Iterable[JointCandidate]) -> None:
        unlikely, later, waiting = 0, 0, deque(candidates)
        while waiting:
            best, candidate = self.best, waiting.popleft()
            if self.objective.bound(candidate) == math.inf:
                self._skip(candidate, f"its state takes at least {format_bytes(candidate.least_bytes)}")
            elif self._expected(candidate, at_best=True) >= (self.below if best is None else best.cost):
                self._skip(candidate, "its estimate is above the best plan")
            elif self.allowance.left_s < self.allowance.seconds * (
                    -1.0 if best is None else 1.0 if candidate.takes_long else LEFT):
                self.unplanned += 1
                self._skip(candidate, "time_limit was over before it was planned")
            elif candidate.bytes_with(KEPT_OF_ALL) >= self.refused.get(tuple(candidate.mesh.items()), math.inf):
                self._skip(candidate, "one of fewer bytes on this mesh does not fit")
            elif best is not None and later >= MOST_PLANNED:
                self._skip(candidate, "others with lower estimates were planned")
            elif not candidate.may_fit and (best is not None or unlikely >= MOST_UNLIKELY):
                self._skip(candidate, f"it would take about {format_bytes(candidate.bytes_with(KEPT_OF_ALL))}")
            else:
                unlikely, later = unlikely + (not candidate.may_fit), later + (best is not None)
                self._plan(candidate, self.allowance.part(OF_ONE * self.allowance.seconds))
                waiting = deque(sorted(waiting, key=self._order))  # what it took corrects the others' estimates
        self._plan_again()

    def _plan_again(self) -> None:
        """Plan configurations that were cut short once more with a larger work limit, if nothing was found to fit. Where there
        is an answer, it is not worth the time: it did not make the answers for GPT-3 175B and Llama 8B better."""
        waiting, self.cut_short = self.cut_short, []
        for number, (candidate, reason) in enumerate(waiting):
            if number < MOST_AGAIN and self.best is None:
                self._plan(candidate, WorkLimit(AGAIN * self.allowance.seconds), last=True)
            else:
                self._reject(candidate, reason)

    def _plan(self, candidate: JointCandidate, part: WorkLimit, last: bool = False) -> None:
        """last: a refusal counts, even if the work limit was over."""
        options = candidate.options(self.traces.options)
        try:
            plan = plan_candidate(self.traces.with_options(options), self.cluster, part)
        except Infeasible as error:
            if error.smallest_budget_bytes is not None and (
                    self.least is None or error.smallest_budget_bytes < (self.least.smallest_budget_bytes or math.inf)):
                self.least = error
            self._refuse(candidate, error.what, part.was_over and not last)
            return
        except (BadInput, DepthsDiffer, LayersDiffer) as error:
            self._refuse(candidate, error.what if isinstance(error, BadInput) else
                         f"a few layers do not represent the model: {error}".removesuffix(": "), part.was_over and not last,
                         isinstance(error, DepthsDiffer))
            return
        if plan.memory.peak > candidate.limit:
            self._refuse(candidate, f"it takes {format_bytes(plan.memory.peak)}", part.was_over and not last)
            return
        us, cost = self.objective.simulated(plan)
        log.info("%s on the mesh %s: %s a step, %s", candidate, candidate.mesh, self.objective.format(cost),
                 format_bytes(plan.memory.peak))
        self.found.append(FoundPlan(us, cost, plan, candidate))
        self._correct(candidate, us, sum(graph.predicted.again_us for graph in plan.graphs))

    def _correct(self, candidate: JointCandidate, us: float, again_us: float) -> None:
        """Correct estimates of configurations like one whose plan takes `us`, of which again_us is recomputation."""
        alike, family = _likeness(candidate)
        self.ratios[alike] = (us - again_us) / candidate.saved_us if candidate.saved_us else 1.0
        ratio = us / candidate.us if candidate.us else 1.0
        if ratio <= MOST_OFF:
            self.ratios[family] = min(ratio, self.ratios.get(family, math.inf))

    def _refuse(self, candidate: JointCandidate, reason: str, cut_short: bool, for_bytes: bool = True) -> None:
        if for_bytes:
            key = tuple(candidate.mesh.items())
            self.refused[key] = min(self.refused.get(key, math.inf), candidate.bytes_with(KEPT_OF_ALL))
        if cut_short:
            self.cut_short.append((candidate, reason))
        else:
            self._reject(candidate, reason)

    def _reject(self, candidate: JointCandidate, reason: str, cost: float | None = None) -> None:
        log.info("rejected: %s on the mesh %s, %s", candidate, candidate.mesh, reason)
        bound = found if (found := self.objective.bound(candidate)) < math.inf else None
        self.rejected.append(MeshAttempt(mesh=candidate.mesh, cost=cost, bound=bound, reason=f"{candidate}: {reason}",
                                         objective=self.objective.name))

    def _skip(self, candidate: JointCandidate, reason: str) -> None:
        """Reject without a plan. The first one of each mesh, which has the lowest estimate, stands for the others."""
        known = self.skipped.setdefault(tuple(candidate.mesh.items()), len(self.rejected))
        if known == len(self.rejected):
            self._reject(candidate, reason)
            return
        first = self.rejected[known]
        if (bound := self.objective.bound(candidate)) < (math.inf if first.bound is None else first.bound):
            self.rejected[known] = first.model_copy(update={"bound": bound})

    def _raise_bounds(self) -> None:
        """Place the whole batch on meshes of which only an estimate is known, as long as one of them has the lowest bound."""
        best, limit = self.best, WorkLimit(FOR_BOUNDS * self.allowance.seconds)
        while best is not None and not limit.is_over and self.considered:
            lowest = min(self.considered, key=self.objective.bound)
            if lowest.cost.placed or self.objective.bound(lowest) >= (1.0 - self.traces.options.gap) * best.cost:
                break
            cost, mesh = self.of_meshes.exact(lowest.stages, lowest.cost.mesh, limit), lowest.mesh
            if cost is not None:
                least = lowest.least.with_another(cost, lowest.stages)
                self.considered = [replace(each, cost=cost if each.mesh == mesh else each.cost, least=least)
                                   if each.mesh == mesh or least != each.least else each for each in self.considered]
            elif limit.was_over:  # why it was not placed; its bound stands
                break
            else:  # no configuration on it can be planned
                self.considered = [each for each in self.considered if each.mesh != mesh]
        falling = sorted((each for each in self.considered if each.bound_us < math.inf), key=self.objective.bound, reverse=True)
        bounds = {tuple(each.mesh.items()): self.objective.bound(each) for each in falling}  # the last one of a mesh counts
        self.rejected = [each.model_copy(update={"bound": bounds.get(tuple(each.mesh.items()), each.bound)})
                         for each in self.rejected]

    def _candidates(self) -> Iterator[JointCandidate]:
        decisions, limit = self.decisions, memory_limit(self.traces.options, self.cluster)
        costs, contention = self.costs(), CONTENTION[self.cluster.device.kind]
        least = self.of_meshes.least(costs)
        for stages, cost in costs:
            for count in decisions.microbatch_counts(cost.mesh):
                if stages == 1 or count >= stages:
                    for schedule in decisions.schedules(stages, count, least.layers):
                        yield JointCandidate(stages, cost, count, limit, schedule, least, contention)

    def costs(self) -> list[tuple[int, StageCost]]:
        """Numbers of stages with meshes of a stage, and what the whole batch costs on these."""
        stage_counts = self.decisions.stage_counts(None if self.folded is None else self.folded.layers * len(self.folded.lists))
        found = self.of_meshes.all((stages, mesh) for stages in stage_counts for mesh in self.decisions.stage_meshes(stages))
        self.least = self.least or self.of_meshes.refusal
        return found

    def _reported(self, best: FoundPlan) -> Plan:
        """The plan with the bound over all configurations that were considered."""
        for each in (each for each in self.found if each is not best):
            self._reject(each.candidate, "its simulated step " + self.objective.is_worse, each.cost)
        cost, plan, candidate = best.cost, best.plan, best.candidate
        bound = min([cost, *map(self.objective.bound, self.considered), *(each.cost for each in self.found)])
        gap = 1.0 - bound / cost if cost else 0.0
        optimal = gap <= self.traces.options.gap and not self.allowance.is_over
        solved = {"status": "optimal" if optimal else "feasible", "cost": cost, "bound": bound, "gap": gap,
                  "simulated_us": best.simulated_us,
                  "simulated_bound_us": bound if self.objective.name == "time" else None}
        graphs = tuple(graph.model_copy(update={"solver": graph.solver.model_copy(update=solved)}) for graph in plan.graphs)
        log.info("nothing was pinned: hpml chose the mesh %s, %s; it is at most %.1f %% above the bound of %s", candidate.mesh,
                 candidate, 100 * gap, self.objective.format(bound))
        return plan.model_copy(update={"graphs": graphs, "rejected": tuple(self.rejected)})

    def _refused(self) -> Infeasible:
        """The error where nothing fits, with a memory that is known to be enough where planning without a search found one."""
        options, trained = self.traces.options, sum(self.traces.trained.values())
        known = self.refusal if self.refusal.smallest_budget_bytes is not None else self.least or self.refusal
        return SearchRefusal(
            known, memory_limit(options, self.cluster), self.cluster.world_size, (2 + options.resident_states) * trained,
            len(self.rejected), self.unplanned, min((each.bound_us for each in self.considered), default=0.0),
            min((each.least_bytes for each in self.considered), default=0.0),
            self.decisions.mixed if self.decisions.microbatches_are_open else ()).error()


def _likeness(candidate: JointCandidate) -> tuple[Hashable, Hashable]:
    """Keys of configurations whose estimates are off by about the same factor, the most alike first: on the same mesh with
    stages, or only in a loop, or neither; with the same schedule, or any."""
    family = (*candidate.mesh.items(), candidate.stages > 1, candidate.in_loop)
    return (family, candidate.schedule), family
