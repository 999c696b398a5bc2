"""The cost of storing one parameter otherwise: the best plan in which this one decision is another, solved anew."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import DecisionRecord, GraphPlan
from hpml_compiler.visualize.description.placement_words import value_words, words_text
from hpml_compiler.visualize.formatting import format_bytes, format_placements, format_us
from passes.errors import HpmlError

MOST = 3
Replan = Callable[[Plan], Plan]
"""Plans the same model on the same mesh with the decisions of a plan, and solves all that it leaves open."""


def alternatives_text(plan: Plan, name: str, replan: Replan) -> str:
    """Lines on up to MOST other placements of a parameter; why there are none for what cannot be changed alone."""
    graph = next((graph for graph in plan.graphs if name in graph.parameters), None)
    if graph is None:
        return ""
    parameter = graph.parameters[name]
    if graph.pipeline is not None or graph.microbatches is not None or graph.graph_hash.startswith("shortened:"):
        what = "pipeline stages or microbatches" if graph.pipeline or graph.microbatches else "layers that it did not trace"
        return f"  alternatives are not solved for a plan with {what}"
    if parameter.entity not in graph.decisions:
        return "  alternatives are not solved: the plan does not record this decision"
    lines = [f"  otherwise (planned again with {name} stored so, all else free)"]
    for placements in _others(graph, name):
        label = ",".join(placements)
        old = graph.decisions[parameter.entity]
        pinned = DecisionRecord(inputs=(label,) * len(old.inputs), outputs=(label,) * len(old.outputs))
        edited = graph.model_copy(update={"decisions": {parameter.entity: pinned}})
        words = words_text(value_words(placements, parameter.dims, graph.mesh))
        how = f"{words} ({format_placements(placements, graph.mesh)})"
        try:
            found = replan(plan.model_copy(update={"graphs": tuple(edited if each is graph else each for each in plan.graphs)}))
            lines.append(f"    {how}: {_compared(plan, found)}")
        except HpmlError as error:
            lines.append(f"    {how}: impossible, {error.what}")
    return "\n".join(lines) if len(lines) > 1 else "  no axis of the mesh divides another of its dims"


def _others(graph: GraphPlan, name: str) -> list[Sequence[str]]:
    """Placements that differ on one axis: whole, or split on another dim that the axis divides."""
    parameter = graph.parameters[name]
    return list(_changed(graph, parameter.placements, parameter.shape))[:MOST]


def _changed(graph: GraphPlan, placements: Sequence[str], shape: Sequence[int]) -> Iterator[Sequence[str]]:
    for whole in (True, False):
        for number, size in enumerate(graph.mesh.values()):
            taken = {place for k, place in enumerate(placements) if k != number}
            places = ["R"] if whole else [f"S({dim})" for dim, length in enumerate(shape) if length % size == 0]
            for place in places:
                if size > 1 and place != placements[number] and (whole or place not in taken):
                    yield [*placements[:number], place, *placements[number + 1:]]


def _compared(plan: Plan, other: Plan) -> str:
    before, after = plan.predicted.step_time_us, other.predicted.step_time_us
    peak = other.memory.peak - plan.memory.peak
    memory = f", {format_bytes(abs(peak))} {'more' if peak > 0 else 'less'} at the peak" if peak else ", the same peak"
    return f"{format_us(after)} a step, {after / before - 1:+.2%}{memory}" if before else format_us(after)
