"""Persistent plan cache: a graph's decisions are looked up in a file before they are searched for again.

A cached plan is applied as a saved plan is: the problem is built for this graph, at today's costs, and every choice is priced
and checked in it. So an entry that is stale, corrupt or for another graph costs a search, and nothing else.
"""
from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
from pydantic import Field, ValidationError

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import checkpointing_plan
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.plans.cache import plan_database
from hpml_compiler.plans.cache.cache_warnings import warn_of_cache
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.record_fields import Mesh, Names, Record
from hpml_compiler.plans.schema import DecisionRecord, MeshAttempt, SolverReport
from passes import compat
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import BadInput, Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.serialization.extension_fingerprint import extension_fingerprint_of, source_of
from passes.sharding.loop_gathers import LoopGathers
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")

NAME = "an earlier launch"
CLOSE = 1e-6
"""Largest relative difference between the cost and the cached one, if costs are the same."""
LIKE_PRICES = 1.5
"""Largest ratio between two quick profiles, which are short and may run on a busy machine."""
PROBES_BYTES = (2.0**12, 2.0**18, 2.0**22)


class CachedPlan(Record):
    """Decisions for one graph, with the report of the search. work_s: what the search took of its work limit. look: costs from
    the quick profile that scaled all others. gathered, reduced: as in `LoopGathers`, with microbatches under a budget."""

    name: str = NAME
    mesh: Mesh
    decisions: dict[str, DecisionRecord]
    solver: SolverReport
    work_s: float = 0.0
    rejected: Annotated[tuple[MeshAttempt, ...], Field(strict=False)]
    kept: CheckpointingPlan | None = None
    gathered: Names | None = None
    reduced: Names = ()
    look: dict[str, float] = Field(default_factory=dict)

    @property
    def repeats(self) -> LoopGathers | None:
        return None if self.gathered is None else LoopGathers(self.gathered, self.reduced)


@dataclass(frozen=True)
class PlanCache:
    """The plan cache for one graph. key: digest of all that determines its plan except the costs of the quick profile, which
    are in `quick_profile`. options: with the budget, if there is one, in bytes."""

    key: str
    quick_profile: Mapping[str, float]
    options: Options

    def about(self, *others: object) -> PlanCache:
        """The cache for a plan that depends on these values, too, by their `repr`."""
        return replace(self, key=plan_database.digest_of([self.key, *others]))

    def plan(self, obey: Callable[[CachedPlan], PlanResult | None], search: Callable[[], PlanResult], allowance: WorkLimit,
             ) -> PlanResult:
        """The cached plan, or a new one. obey: plans the graph with the cached decisions; None, BadInput or Infeasible where
        these do not fit. search: finds a new plan, within this allowance, which a cached plan takes as much of: a search of
        which this is a part goes on as it did when the plan was new, and ends with the same answer."""
        if not plan_database.is_on():
            return search()
        found, left_s = self._found(), allowance.left_s
        if found is not None:
            if (planned := self._obeyed(obey, found)) is not None:
                log.info("%s: the plan is read from the plan cache; set HPML_CACHE=0 to search again", planned.record.name)
                allowance.take(found.work_s - (left_s - allowance.left_s))
                return planned
            log.info("the cached plan does not fit any more; hpml searches again")
        left_s = allowance.left_s
        planned = search()
        if not allowance.was_over:  # a search that was cut short is not cached: the next may have more time
            self._remember(planned, left_s - allowance.left_s)
        return planned

    def _found(self) -> CachedPlan | None:
        """The entry; None where there is none, it cannot be read, or costs were different."""
        try:
            text = plan_database.get(self.key)
        except BadInput as error:
            warn_of_cache("the plan cache cannot be read; hpml searches again", error)
            return None
        try:
            found = None if text is None else CachedPlan.model_validate_json(text)
        except ValidationError:
            log.warning("the cached plan is corrupt; hpml searches again")
            return None
        return found if found is not None and _alike(found.look, self.quick_profile) else None

    def _obeyed(self, obey: Callable[[CachedPlan], PlanResult | None], found: CachedPlan) -> PlanResult | None:
        """The cached plan with its search report, whose bound holds for equal costs; None if the answer has another cost."""
        try:
            planned = obey(found)
        except (BadInput, Infeasible) as refusal:
            log.info("%s", refusal)
            return None
        if planned is None or found.look or self.quick_profile:
            return planned
        record = planned.record
        if not math.isclose(record.solver.cost or 0.0, found.solver.cost or 0.0, rel_tol=CLOSE):
            return None
        report = found.solver.model_copy(update={"seconds": record.solver.seconds})
        return replace(planned, record=record.model_copy(update={"solver": report}), rejected=found.rejected)

    def _remember(self, planned: PlanResult, work_s: float) -> None:
        record = planned.record
        kept = None if planned.checkpointing is None else checkpointing_plan(planned.checkpointing, self.options)
        entry = CachedPlan(mesh=record.mesh, decisions=record.decisions, solver=record.solver, work_s=work_s,
                           rejected=planned.rejected, kept=kept, look=dict(self.quick_profile),
                           **({} if planned.repeats is None else asdict(planned.repeats)))
        try:
            plan_database.put(self.key, entry.model_dump_json())
        except BadInput as error:
            warn_of_cache("this plan cannot be cached; the next launch searches again", error)


def plan_cache_of(annotated: AnalyzedGraph, options: Options, cluster: Cluster, look: CachedMeasurements | None,
                  *others: object) -> PlanCache:
    """The plan cache for a graph. others: values that the plan depends on, too, by their `repr`."""
    if not plan_database.is_on():
        return PlanCache("", {}, options)
    digest = annotated.hash()
    prices = measured_costs.digest(options, cluster, digest)
    interface = annotated.interface
    roles = [dict(interface.kinds), dict(interface.trainable), dict(interface.stored), interface.outputs,
             interface.forward_outputs, interface.training]
    given = json.dumps(options.to_json(), sort_keys=True)
    parts = [digest, roles, given, cluster, prices, torch.__version__, plan_database.planners_code(), _rules(annotated),
             extension_fingerprint_of(), _operators(annotated), *others]
    return PlanCache(plan_database.digest_of(parts), {} if look is None else _prices(look, cluster), options)


def _rules(annotated: AnalyzedGraph) -> list[object]:
    """Strategies of each operation, by its sharding rule. Those that equal calls share are written once."""
    operations = annotated.graph.operations
    shared = {id(op.strategies): op.strategies for op in operations}
    places = {each: place for place, each in enumerate(shared)}
    return [*shared.values(), *((places[id(op.strategies)], op.heavy, op.linear) for op in operations)]


def _operators(annotated: AnalyzedGraph) -> dict[str, str]:
    """Source code of the custom operators in the graph, by name."""
    return {name: source_of(function) for name, function in compat.custom_op_functions(annotated.gm).items()}


def _prices(look: CachedMeasurements, cluster: Cluster) -> dict[str, float]:
    """Costs of a quick profile, as numbers to compare."""
    found = {f"kernels: {kind}": factor for kind, factor in look.measurements.factors.items()}
    (axis,) = mesh_from_pin({"all": cluster.world_size}, cluster).axes
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        if look.collectives is not None and look.collectives.is_measured(kind):
            found |= {f"{kind}: {nbytes:.0f}": look.collectives.collective_us(kind, axis, nbytes) for nbytes in PROBES_BYTES}
    return found


def _alike(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    return a.keys() == b.keys() and all(a[k] <= LIKE_PRICES * b[k] and b[k] <= LIKE_PRICES * a[k] for k in a)
