"""Answer of the placement search for one graph."""
from __future__ import annotations

from dataclasses import dataclass

from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.decision import Decision
from passes.sharding.loop_gathers import LoopGathers


@dataclass(frozen=True)
class PlanResult:
    """The decision that every rank needs to rewrite its graph, and the record for people."""

    mesh: dict[str, int]
    decision: Decision
    record: GraphPlan
    rejected: tuple[MeshAttempt, ...]
    checkpointing: CheckpointDecision | None = None
    """The checkpointing decision of this rank's graph, under a budget (`hpml_compiler.planner.search.budget_search`)."""
    repeats: LoopGathers | None = None
    """Collectives of parameters that each microbatch repeats, under a budget."""
    repeats_us: float = 0.0
    """Time that a step takes longer because of them."""
