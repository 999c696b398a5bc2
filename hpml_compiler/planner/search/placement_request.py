"""Request for the placements of one graph. Runs, offline plans, pipeline stages and memory budgets all search this way."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.same_structure import SavedDecisions
from hpml_compiler.planner.search.budget_trials import cached_or_new, cached_or_new_within, plan_by_trials
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.search.fitting_search import FittingSearch, PlacementSearch, first_answer
from hpml_compiler.planner.search.plan_cache import PlanCache, plan_cache_of
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import MicrobatchPlacement
from passes.hardware.cluster import Cluster
from passes.sharding.search.mesh_search import SearchTables
from passes.solver.work_limit import WorkLimit


@dataclass(frozen=True)
class PlacementRequest:
    """cluster: the devices to plan for. fixed_mesh, rows, given, like, quick: see `plan_graph`. folded: the deeper model of
    which a few layers were traced. times: placements on the microbatch axis, on which the cached plan depends."""

    annotated: AnalyzedGraph
    options: Options
    cluster: Cluster
    name: str
    fixed_mesh: Mapping[str, int] | None = None
    rows: frozenset[str] = frozenset()
    given: Plan | None = None
    like: SavedDecisions | None = None
    quick: CachedMeasurements | None = None
    folded: FewLayerTrace | None = None
    times: MicrobatchPlacement | None = None

    def place(self, allowance: WorkLimit, fitting: FittingSearch | None = None, trial: DryRun | None = None,
              pinned: CheckpointingPlan | None = None, hurried: bool = False) -> tuple[PlanResult, GraphPlan]:
        """The answer of the search, and the record of the step. fitting: the search for an answer that fits in memory; without
        it, the first answer is taken. trial: under a memory budget, tries answers out; pinned: checkpointing of a saved plan to
        apply. hurried: see `FittingSearch`. Raises Infeasible."""
        if trial is None:
            search = self._search(allowance)
            return first_answer(search) if fitting is None else fitting(search, hurried)
        cache = self._cache() if self.folded is None else None
        planned = plan_by_trials(self._plan, trial, allowance, pinned) if cache is None else (
            cached_or_new(cache, self._plan, trial, allowance))
        return planned, planned.record if fitting is None else fitting.finish(planned)

    def _search(self, allowance: WorkLimit) -> PlacementSearch:
        cache, plan = self._cache(), partial(self._plan, memos=SearchTables())  # its calls differ in bytes alone
        return partial(plan, allowance=allowance) if cache is None else partial(cached_or_new_within, cache, plan, allowance)

    @property
    def _plan(self) -> Callable[..., PlanResult]:
        plan = partial(plan_graph, self.annotated, self.options, self.cluster, fixed_mesh=self.fixed_mesh, name=self.name,
                       rows=self.rows, given=self.given, like=self.like, quick=self.quick)
        return plan if self.folded is None else partial(plan, shorter=self.folded.shorter, further=self.folded.further)

    def _cache(self) -> PlanCache | None:
        """The plan cache; None where the decisions come from another plan."""
        if self.given is not None or self.like is not None:
            return None
        further = 0 if self.folded is None else self.folded.further
        return plan_cache_of(self.annotated, self.options, self.cluster, self.quick, self.fixed_mesh, sorted(self.rows),
                             self.times, further)
