"""Pins of one value: the decision about the group of operations that makes it, with all its other ends left open."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from hpml_compiler.plans.schema import DecisionRecord, GraphPlan
from passes.op_rules.dim_texts import parse_dims
from passes.sharding.strategies.mesh_strategies import FREE

PP_AXIS = "pp"


def why_not_alone(graph: GraphPlan, name: str) -> str:
    """The reason why a value's placement cannot be pinned alone; "" if it can."""
    operation, group = graph.operations[name], group_of(graph, name)
    if operation.class_id not in graph.decisions:
        return "the plan does not record this decision"
    results = results_of(graph, group)
    if name not in results:
        others = f"; ask for {' or '.join(results[:3])}" if results else ""
        return f"{name} is inside of a kernel, whose results are placed{others}"
    if not operation.dims or not parse_dims(operation.dims[0]):
        return f"the plan does not record the sizes of {name}"
    if [label for _, label in _ends(graph, results)] != [*graph.decisions[operation.class_id].outputs]:
        return f"{name} is decided together with values of other layers"
    return ""


def pin_of_value(graph: GraphPlan, name: str, label: str) -> DecisionRecord:
    """The decision in which a value has this label and all else is open. For values of which `why_not_alone` says nothing."""
    old, ends = graph.decisions[graph.operations[name].class_id], _ends(graph, results_of(graph, group_of(graph, name)))
    first = [each for each, _ in ends].index(name)
    return DecisionRecord(inputs=(FREE,) * len(old.inputs),
                          outputs=tuple(label if number == first else FREE for number in range(len(ends))))


def group_of(graph: GraphPlan, name: str) -> list[str]:
    """The operations that are decided together with this one, in order: connected ones of its class and block."""
    own = graph.operations[name]
    alike = {each: operation for each, operation in graph.operations.items()
             if operation.class_id == own.class_id and operation.block == own.block}
    found, left = {name}, [name]
    while left:
        here = left.pop()
        near = {*alike[here].sources, *(each for each, operation in alike.items() if here in operation.sources)}
        new = near.intersection(alike) - found
        found |= new
        left += new
    return [each for each in alike if each in found]


def results_of(graph: GraphPlan, group: list[str]) -> list[str]:
    """The operations of a group whose results are read outside of it, or returned."""
    own, inside, outside = set(group), set[str](), set[str]()
    for name, operation in graph.operations.items():
        (inside if name in own else outside).update(operation.sources)
    outside.update(graph.outputs, (parameter.gradient for parameter in graph.parameters.values()))
    return [each for each in group if each in outside or each not in inside]


def _ends(graph: GraphPlan, results: Sequence[str]) -> list[tuple[str, str]]:
    """Operation and label of each result, in the order in which they are decided."""
    axes = [axis != PP_AXIS or graph.pipeline is None for axis in graph.mesh]
    return [(name, ",".join(compress(places, axes))) for name in results for places in graph.operations[name].outputs]
