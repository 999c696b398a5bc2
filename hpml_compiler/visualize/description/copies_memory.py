"""Bytes of copies of state (`redundancy`), which a plan's peak includes on CPUs alone, and of the state of PowerSGD, which it
does not."""
from __future__ import annotations

import math

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.peak_memory import copies_bytes
from hpml_compiler.plans.schema import GraphPlan
from passes.hardware.gradient_compression import rank_of


def _redundancy_of(plan: PlanContent) -> int:
    """Ranks that hold a copy of each rank's state: at most all others."""
    wanted = plan.options.get("redundancy", 0)
    return min(wanted, plan.world_size - 1) if isinstance(wanted, int) else 0


def copy_bytes(plan: PlanContent) -> int:
    """Host memory of a rank for copies: of its own parameters and optimizer state, and of what `redundancy` others have of
    those that no more ranks have. 0 where these are none."""
    redundancy = _redundancy_of(plan)
    return max((_copies(graph, redundancy) for graph in plan.step_graphs), default=0) if redundancy else 0


def low_rank_bytes(plan: PlanContent) -> int:
    """Device memory of a rank for PowerSGD: the error of each gradient, and at most what it sends, for its basis."""
    return sum(each.multiplicity * (hop.whole_bytes + hop.bytes) for graph in plan.step_graphs for each in graph.redistributions
               for hop in each.hops if rank_of(hop.compression))


def _copies(graph: GraphPlan, redundancy: int) -> int:
    """Those of the rank that has most of the graph: in a pipeline, it has one part of the parameters."""
    ranks = math.prod(graph.mesh.values())
    if graph.pipeline is not None:
        ranks //= graph.pipeline.ranks
    states = graph.memory.optimizer / graph.memory.gradients if graph.memory.gradients else 0.0
    stored = sum(each.bytes_per_device for each in graph.parameters.values())
    part = graph.memory.parameters / stored if graph.pipeline is not None and stored else 1.0
    return round(part * copies_bytes(graph.parameters.values(), states, redundancy, ranks))
