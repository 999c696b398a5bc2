"""Search for a plan that fits in device memory, or raise an error with the excess and remedies.

The placement problem adds up bytes at one or two moments. Whether a step fits is decided by the peak that its plan reports
(`hpml_compiler.planner.graph.plan_assembly`): where that exceeds a device's memory, the search is repeated with a budget
that is smaller by the excess.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.plan_assembly import with_peak
from hpml_compiler.plans.peak_memory import VERSIONS
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.visualize.formatting import format_bytes
from passes import compat
from passes.errors import Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel

log = logging.getLogger("hpml")
MOST_SEARCHES = 4
LEAST = 1.0
"""A budget that nothing meets, to find the answer with the least memory."""
FAR_BELOW = 0.5
"""Part of a device's memory: below it, the placement problem's count is enough before a first step."""


class PlacementSearch(Protocol):
    """Finds placements within these limits: see `plan_graph`."""

    def __call__(self, *, lifetimes: MemoryModel, **limits: Any) -> PlanResult: ...


def record_of(planned: PlanResult) -> GraphPlan:
    return planned.record


@dataclass(frozen=True)
class FittingSearch:
    """Searches until an answer fits. cluster: of all devices. finish: makes the record of an answer's step, except its peak.
    lifetimes: when a search counts bytes; where it finds nothing that way, and in further searches, saved values and gradients
    count while they are in memory. devices: number of devices whose bytes a search adds up, such as one of each stage."""

    options: Options
    cluster: Cluster
    finish: Callable[[PlanResult], GraphPlan] = record_of
    lifetimes: MemoryModel = STEP_PEAK
    devices: int = 1

    def __call__(self, search: PlacementSearch, hurried: bool = False) -> tuple[PlanResult, GraphPlan]:
        """The first answer of the search that fits, and its finished record. hurried: accept an answer far below a device's
        memory at once; its peak is counted on demand.

        Raises Infeasible with the least memory that was found to work."""
        limit = memory_limit(self.options, self.cluster)
        again = partial(search, lifetimes=MemoryModel(self._saved_share))
        is_least = False
        try:
            planned = search(lifetimes=self.lifetimes)
        except Infeasible as refusal:
            log.info("no placements fit with all saved values and gradients in memory at once; counting with a simulated "
                     "step: %s", refusal.what)
            planned, is_least = _or_least(again)
        record = self.finish(planned)
        if hurried and record.memory.peak <= FAR_BELOW * limit:
            return planned, record
        tried: list[GraphPlan] = []
        budget = float(self.devices * limit)
        while True:
            record = self._counted(record)
            tried.append(record)
            excess = record.memory.peak - limit
            if excess <= 0:
                return planned, record
            if is_least or len(tried) == MOST_SEARCHES:
                break
            log.info("%s: a device would need %s of its %s; searching for placements that need less", record.name,
                     format_bytes(record.memory.peak), format_bytes(limit))
            budget = min(budget, _held(planned.record, self._saved_share)) - self.devices * excess
            if budget <= 0 or len(tried) == MOST_SEARCHES - 1:
                budget = LEAST
            try:
                planned, is_least = _or_least(partial(again, budget_bytes=budget))
            except Infeasible:
                break
            planned = _without_bound(planned)
            record = self.finish(planned)
        raise over_budget(min(tried, key=lambda record: record.memory.peak), limit, self.options)

    @property
    def _saved_share(self) -> float:
        """Part of the saved values that further searches count."""
        share = self.lifetimes.saved_share
        return self.lifetimes.in_flight if share is None else share

    def _counted(self, record: GraphPlan) -> GraphPlan:
        return with_peak(record, self.options, self.cluster)


def _or_least(search: Callable[..., PlanResult]) -> tuple[PlanResult, bool]:
    """An answer within the budget or, where there is none, the one with the least memory, and whether it is that. Raises
    Infeasible where the least is unknown."""
    try:
        return search(), False
    except Infeasible as refusal:
        if refusal.smallest_budget_bytes is None:
            raise
        return search(budget_bytes=refusal.smallest_budget_bytes), True


def first_answer(search: PlacementSearch) -> tuple[PlanResult, GraphPlan]:
    """The first answer of a search, whether it fits or not, and its record: in place of a `FittingSearch`."""
    planned = search(lifetimes=STEP_PEAK)
    return planned, planned.record


def check_fits(record: GraphPlan, options: Options, cluster: Cluster) -> GraphPlan:
    """The plan with its peak; raises Infeasible where that is more than a device may hold."""
    record = with_peak(record, options, cluster)
    limit = memory_limit(options, cluster)
    if record.memory.peak > limit:
        raise over_budget(record, limit, options)
    return record


def fits_replicated(annotated: AnalyzedGraph, options: Options, cluster: Cluster) -> bool:
    """True if a device could hold twice all values of a graph, with its parameters, their gradients and the optimizer state:
    its peak need not be counted before a first step, then."""
    copies = VERSIONS * (1 + options.redundancy) * (1 + options.optimizer_states) if options.redundancy else 0
    total = (2 + options.optimizer_states + copies) * sum(x.bytes for x in annotated.graph.values if x.kind == "parameter")
    for node in annotated.gm.graph.nodes:
        for value in compat.pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                elements = compat.static_int(value.numel())
                if elements is None:
                    return False
                total += elements * value.element_size()
    return total <= FAR_BELOW * memory_limit(options, cluster)


def memory_limit(options: Options, cluster: Cluster) -> int:
    """Bytes that a device may hold: its memory, or a budget that is less."""
    memory_bytes = cluster.device.memory_bytes
    budget = options.budget_bytes(memory_bytes)
    return memory_bytes if budget is None else min(budget, memory_bytes)


def over_budget(record: GraphPlan, limit: int, options: Options) -> Infeasible:
    """The error for a plan that exceeds the limit, with bytes by part and remedies."""
    parts = "" if record.at_peak is None else "; at the peak: " + ", ".join(
        f"{part} {format_bytes(nbytes)}" for part, nbytes in record.at_peak.parts.items())
    pipe, times = record.pipeline, record.microbatches
    who = f"the rank with the highest peak of {len(pipe.stages)} stages" if pipe is not None else (
        f"with {times.count} microbatches, a device" if times is not None else "a device")
    may = f"the budget of {format_bytes(limit)}" if options.memory_budget is not None else f"its {format_bytes(limit)}"
    error = Infeasible(f"{who} needs {format_bytes(record.memory.peak)}, more than {may}{parts}", record.name,
                       ", or ".join(_remedies(record, options)))
    error.smallest_budget_bytes = record.memory.peak
    error.plan = record
    return error


def _remedies(record: GraphPlan, options: Options) -> list[str]:
    found = [f"devices of {record.memory.peak} bytes or more"]
    found += ["redundancy=0"] if record.memory.copies else []
    if record.pipeline is not None:
        found += ["more stages", "a stage on more devices", f"more microbatches than {record.pipeline.microbatches}"]
    elif record.microbatches is not None:
        found += [f"more microbatches than {record.microbatches.count}", "more devices to shard parameters over"]
    else:
        found += ["more devices", "fewer rows", "microbatches"]
        if options.memory_budget is None:
            found.append('memory_budget="100%", which allows recomputation')
        elif not options.trace_all_layers:
            found.append("trace_all_layers=True, which allows recomputation per value")
    return ["use " + found[0], *found[1:]]


def _without_bound(planned: PlanResult) -> PlanResult:
    """Drop the claim to be optimal: a plan found with a reduced budget may be slower than the best one."""
    return replace(planned, record=planned.record.model_copy(update={"solver": planned.record.solver.without_bound()}))


def _held(record: GraphPlan, in_flight: float) -> float:
    """Bytes at the higher of the two moments that the placement problem counts: see `MemoryModel`."""
    memory = record.memory
    return float(memory.parameters + memory.optimizer + max(in_flight * memory.activations, memory.gradients))
