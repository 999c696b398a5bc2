"""Options that a plan was made with, as far as they are part of it."""
from __future__ import annotations

from typing import Any

from hpml_compiler.plan_api.model_plan import Plan
from passes.hardware.gradient_compression import steps_apart


def made_with(plan: Plan) -> dict[str, Any]:
    """Options that follow from a plan: memory budget, microbatches, mesh, schedule, compression of gradients or
    steps between averages."""
    found: dict[str, Any] = {}
    for graph in plan.step_graphs:
        if graph.kept is not None:
            found["memory_budget"] = graph.kept.budget_bytes
        if graph.rows_by_rank:
            found["rows"] = dict(graph.rows_by_rank)
        if graph.microbatches is not None:
            found["microbatches"] = graph.microbatches.count
        if (pipe := graph.pipeline) is not None:
            if (kept := pipe.stages[0].kept) is not None and kept.budget_bytes is not None:
                found["memory_budget"] = kept.budget_bytes
            found |= {"mesh": dict(plan.mesh), "schedule": pipe.schedule, "virtual_stages": pipe.virtual_stages}
    compress = {hop.axis: hop.compression for graph in plan.step_graphs for move in graph.redistributions for hop in move.hops
                if hop.compression}
    steps = {axis: steps for axis, each in compress.items() if (steps := steps_apart(each))}
    compress = {axis: each for axis, each in compress.items() if axis not in steps}
    return found | ({"compress": compress} if compress else {}) | ({"local_steps": steps} if steps else {})
