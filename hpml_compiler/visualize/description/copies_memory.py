"""Bytes that a plan's peak does not include: copies of state (`redundancy`), and the state of PowerSGD."""
from __future__ import annotations

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import GraphPlan
from passes.hardware.gradient_compression import rank_of

VERSIONS = 2
"""Copies of two steps are kept: that of one until all ranks have that of the next."""


def _redundancy_of(plan: PlanContent) -> int:
    """Ranks that hold a copy of each rank's state: at most all others."""
    wanted = plan.options.get("redundancy", 0)
    return min(wanted, plan.world_size - 1) if isinstance(wanted, int) else 0


def copy_bytes(plan: PlanContent) -> int:
    """Host memory of a rank for copies: of its own parameters and optimizer state, and of what `redundancy` others have of
    sharded ones. 0 where nothing is sharded: each rank then has all of the state."""
    redundancy = _redundancy_of(plan)
    if not redundancy or not plan.step_graphs:
        return 0
    sharded, whole = map(max, zip(*map(_state_bytes, plan.step_graphs)))
    return VERSIONS * ((1 + redundancy) * sharded + whole) if sharded else 0


def low_rank_bytes(plan: PlanContent) -> int:
    """Device memory of a rank for PowerSGD: the error of each gradient, and at most what it sends, for its basis."""
    return sum(each.multiplicity * (hop.whole_bytes + hop.bytes) for graph in plan.step_graphs for each in graph.redistributions
               for hop in each.hops if rank_of(hop.compression))


def _state_bytes(graph: GraphPlan) -> tuple[int, int]:
    """Parameters and optimizer state of the fullest rank: sharded, and whole."""
    states = graph.memory.optimizer / graph.memory.gradients if graph.memory.gradients else 0.0
    found = [0.0, 0.0]
    for each in graph.parameters.values():
        found[each.bytes_per_device == each.bytes_whole] += each.bytes_per_device * (1 + states * each.trainable)
    return round(found[0]), round(found[1])
