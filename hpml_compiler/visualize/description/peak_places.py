"""The place of a plan's memory peak in words, its memory limit, and the activation checkpointing of its graphs and stages."""
from __future__ import annotations

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.schema import ROOT, GraphPlan


def budget_of(plan: PlanContent) -> int | None:
    return next((kept.budget_bytes for graph in plan.step_graphs for kept in kept_by_part(graph).values()), None)


def kept_by_part(graph: GraphPlan) -> dict[str, CheckpointingPlan]:
    """Activation checkpointing of a graph under a memory budget, or of each of its stages."""
    if graph.pipeline is None:
        return {} if graph.kept is None else {graph.name: graph.kept}
    return {f"{graph.name}, stage {k}": stage.kept for k, stage in enumerate(graph.pipeline.stages) if stage.kept is not None}


def describe_moment(peak: Peak) -> str:
    if not peak.node:
        return "an operation that the plan does not list"
    where = f" of {peak.block}" if peak.block and peak.block != ROOT else ""
    what = {"recompute": "recomputed in backward"}.get(peak.phase, f"in {peak.phase}")
    return f"{peak.node}{where}, {what}" if peak.node != "optimizer" else "the optimizer step"


def memory_limit(plan: PlanContent) -> tuple[int | None, str]:
    """The memory budget, else the memory of a device of the plan's cluster; with its name."""
    if budget := budget_of(plan):
        return budget, "the budget"
    if (cluster := plan.known_cluster) is None:
        return None, ""
    device = min((group.device for group in cluster.groups), key=lambda each: each.memory_bytes)
    if device.kind == "cpu":  # shares the memory of its machine, which a plan does not know
        return None, ""
    return device.memory_bytes, f"the memory of {device.name}"
