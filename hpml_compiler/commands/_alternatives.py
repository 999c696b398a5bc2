"""The cost of one decision made otherwise: the best plan in which this one is another, solved anew."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hpml_compiler.commands._value_pins import pin_of_value, why_not_alone
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plan_api.options_of_plan import made_with
from hpml_compiler.plans.schema import DecisionRecord, GraphPlan
from hpml_compiler.visualize.description.placement_words import value_words, words_text
from hpml_compiler.visualize.formatting import format_bytes, format_mesh, format_placements, format_us
from hpml_compiler.visualize.step_explanation import STEP_DECISIONS, microbatches_of
from passes.errors import HpmlError
from passes.op_rules.dim_texts import parse_dims

MOST = 3
PP_AXIS = "pp"
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "gpipe")


class Replan(Protocol):
    """Plans the same model on the same devices with these options, and solves all that they leave open."""

    def __call__(self, **options: Any) -> Plan: ...


def alternatives_text(plan: Plan, name: str, replan: Replan) -> str:
    """Lines on up to MOST other placements of a parameter or value, or other numbers of stages or microbatches, or schedules;
    why there are none for what cannot be changed alone."""
    if name in STEP_DECISIONS and not any(name in graph.parameters for graph in plan.graphs):
        tried, why = list(_other_steps(plan, name))[:MOST], f"  there are no other {name} for these devices and this batch"
        lines = [f"  otherwise (planned again with other {name}, with placements free, and the rest as it is)"]
    else:
        graph = next((graph for graph in plan.graphs if name in graph.parameters or name in graph.operations), None)
        if graph is None:
            return f"  the plan has no parameter or value {name}"
        is_parameter = name in graph.parameters
        if is_parameter and graph.parameters[name].entity not in graph.decisions:
            return "  alternatives are not solved: the plan does not record this decision"
        if not is_parameter and (why := why_not_alone(graph, name)):
            return f"  alternatives are not solved: {why}"
        tried, why = list(_other_placements(plan, graph, name))[:MOST], "  no axis of the mesh divides another of its dims"
        many = graph.multiplicity if is_parameter else "*" in graph.operations[name].class_id
        same = f" and the same {'parameter' if is_parameter else 'value'} of equal layers" if many else ""
        made = "stored" if is_parameter else "made"
        lines = [f"  otherwise (planned again with {name}{same} {made} so, with these stages and microbatches, all else free)"]
    for how, options in tried:
        try:
            lines.append(f"    {how}: {_compared(plan, replan(**options), options)}")
        except HpmlError as error:
            lines.append(f"    {how}: impossible, {_reason(plan, name, error)}")
    return "\n".join(lines) if tried else why


def _reason(plan: Plan, name: str, error: HpmlError) -> str:
    entities = {graph.operations[name].class_id for graph in plan.graphs if name in graph.operations}
    return "its operator has no such choice on these axes" if error.where in entities else error.what


def _other_steps(plan: Plan, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    graph, kept = plan.step_graphs[0], _as_planned(plan)
    if name == "microbatches":
        count = microbatches_of(graph)
        for other in dict.fromkeys((2 * count, count // 2, 1)):
            if other not in (0, count) and (graph.rows is None or graph.rows % other == 0):
                yield f"{other} microbatches" if other > 1 else "the whole batch at once", {**kept, "microbatches": other}
    elif name == "schedule":
        for other in SCHEDULES if graph.pipeline is not None else ():
            if graph.pipeline is not None and other != graph.pipeline.schedule:
                yield other, {**kept, "schedule": other, "virtual_stages": 2 if other == "interleaved" else 1}
    else:
        stages = plan.mesh.get(PP_AXIS, 1)
        for other in dict.fromkeys((2 * stages, stages // 2, 1)):
            mesh = _with_stages(plan.mesh, other) if other not in (0, stages) else None
            if mesh is not None:
                less = {} if other > 1 else {"schedule": "auto", "virtual_stages": 1}
                yield f"mesh {format_mesh(mesh)}", {**kept, **less, "mesh": mesh}


def _with_stages(mesh: Mapping[str, int], stages: int) -> dict[str, int] | None:
    """The mesh with another number of stages: devices go to or come from the first axis that can, data parallelism first."""
    old = mesh.get(PP_AXIS, 1)
    rest = {axis: size for axis, size in mesh.items() if axis != PP_AXIS}
    order = sorted(rest, key=lambda axis: axis != "dp") or ["dp"]
    if stages < old:
        rest[order[0]] = rest.get(order[0], 1) * old // stages
    else:
        axis = next((axis for axis in order if rest.get(axis, 1) % (stages // old) == 0), None)
        if axis is None:
            return None
        rest[axis] = rest[axis] * old // stages
    return {axis: size for axis, size in {PP_AXIS: stages, **rest}.items() if size > 1}


def _other_placements(plan: Plan, graph: GraphPlan, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Placements that differ on one axis: whole, or split on another dim that the axis divides."""
    stages = graph.pipeline is not None
    if name in graph.parameters:
        parameter = graph.parameters[name]
        now, shape, dims, entity = parameter.placements, parameter.shape, parameter.dims, parameter.entity
    else:
        made = graph.operations[name]
        now, dims, entity = made.outputs[0], made.dims[0], made.class_id
        shape = tuple(math.prod(size for size, _ in factors) for factors in parse_dims(dims))
    for placements in _changed(graph, now, shape):
        label = ",".join(place for axis, place in zip(graph.mesh, placements) if not (stages and axis == PP_AXIS))
        old = graph.decisions[entity]
        pinned = pin_of_value(graph, name, label) if name in graph.operations else DecisionRecord(
            inputs=(label,) * len(old.inputs), outputs=(label,) * len(old.outputs))
        edited = graph.model_copy(update={"decisions": {entity: pinned}, "pipeline": None, "kept": None, "microbatches": None})
        graphs = tuple(edited if each is graph else each for each in plan.graphs)
        words = words_text(value_words(placements, dims, graph.mesh))
        yield (f"{words} ({format_placements(placements, graph.mesh)})",
               {**_as_planned(plan), "zero": "auto", "plan": plan.model_copy(update={"graphs": graphs})})


def _as_planned(plan: Plan) -> dict[str, Any]:
    """Options that pin the mesh, stages, microbatches and budget of a plan."""
    return {**({"mesh": dict(plan.mesh)} if plan.world_size > 1 else {}), "microbatches": 1, **made_with(plan)}


def _changed(graph: GraphPlan, placements: Sequence[str], shape: Sequence[int]) -> Iterator[Sequence[str]]:
    for whole in (True, False):
        for number, (axis, size) in enumerate(graph.mesh.items()):
            if size == 1 or (axis == PP_AXIS and graph.pipeline is not None):
                continue
            taken = {place for k, place in enumerate(placements) if k != number}
            places = ["R"] if whole else [f"S({dim})" for dim, length in enumerate(shape) if length % size == 0]
            for place in places:
                if place != placements[number] and (whole or place not in taken):
                    yield [*placements[:number], place, *placements[number + 1:]]


def _compared(plan: Plan, other: Plan, options: Mapping[str, Any]) -> str:
    count = microbatches_of(other.step_graphs[0])
    if count != options.get("microbatches", 1):
        return f"impossible, the rows of a device go through {count} microbatches"
    before, after = plan.predicted.step_time_us, other.predicted.step_time_us
    peak = other.memory.peak - plan.memory.peak
    memory = f", {format_bytes(abs(peak))} {'more' if peak > 0 else 'less'} at the peak" if peak else ", the same peak"
    return f"{format_us(after)} a step, {after / before - 1:+.2%}{memory}" if before else format_us(after)
