"""Explain the decisions about a whole step: pipeline stages, microbatches, schedule."""
from __future__ import annotations

from collections.abc import Iterator

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.visualize.description.describe_plan import describe_step
from hpml_compiler.visualize.formatting import format_bytes, format_mesh, format_us

STEP_DECISIONS = ("stages", "microbatches", "schedule")


def explain_step(plan: PlanContent, name: str) -> str:
    """Explain one of STEP_DECISIONS in every graph."""
    return "\n\n".join("\n".join([f"{name} of {graph.name}, mesh {format_mesh(graph.mesh)}",
                                  *(f"  {line}" for line in _lines(graph, name))]) for graph in plan.step_graphs)


def _lines(graph: GraphPlan, name: str) -> Iterator[str]:
    step, pipe, count = describe_step(graph), graph.pipeline, microbatches_of(graph)
    if name == "microbatches":
        saved = sum(each.saved_bytes for each in step.modules)
        yield f"{count} microbatches" if count > 1 else "one microbatch: the whole batch at once"
        if pipe is None:
            yield f"each saves {format_bytes(saved)} on a device"
        for each in step.stages:
            yield f"stage {each.number} has the activations of {each.in_flight} in memory at a time"
        return
    if pipe is None:
        yield "one stage: every device runs all layers" if name == "stages" else "no schedule: there is one stage"
        return
    if name == "schedule":
        yield f"{pipe.schedule}, {count} microbatches through {len(step.stages)} stages on {pipe.ranks} ranks"
        yield f"ranks wait for {100 * step.bubble:.1f} % of the pipeline's time"
        return
    slowest = max(step.stages, key=lambda each: each.busy_us)
    fullest = max(step.stages, key=lambda each: each.peak_bytes)
    yield f"{len(step.stages)} stages on {pipe.ranks} ranks"
    yield f"slowest: stage {slowest.number}, busy {format_us(slowest.busy_us)} of {format_us(step.step_us)}"
    yield f"fullest: stage {fullest.number}, peak {format_bytes(fullest.peak_bytes)} with the other stages of its devices"
    for each, stage in zip(step.stages, pipe.stages, strict=True):
        yield f"stage {each.number} on {each.devices}: {stage.blocks[0]} to {stage.blocks[-1]}, busy {format_us(each.busy_us)}"


def microbatches_of(graph: GraphPlan) -> int:
    if graph.pipeline is not None:
        return graph.pipeline.microbatches
    return 1 if graph.microbatches is None else graph.microbatches.count
