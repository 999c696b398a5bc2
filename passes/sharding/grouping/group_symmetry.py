"""Classes of equal groups: the repetitions of a block share one decision.

Two groups are in one class if they are equal (operations, strategies, shapes, factors, wiring), in the same phase,
at the same position in repetitions of one block, and save the same values for backward. Tying decisions narrows
the search but never changes a price: the choice of a class is charged once per instance, so the objective is exactly
the cost of the unfolded graph.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence

from passes.graph.placement_graph import PlacementGraph, Value, block_class
from passes.sharding.grouping.op_groups import OpGroup


def value_signature(value: Value) -> Hashable:
    return value.spec, value.factors, value.kind, value.trainable, value.batch


def group_signature(group: OpGroup, graph: PlacementGraph) -> Hashable:
    boundary = {v: ("in", k) for k, v in enumerate(group.inputs)}
    inside: dict[int, tuple] = {}
    rows = []
    for k, index in enumerate(group.operations):
        op = graph.operations[index]
        rows.append((op.target, op.flops, op.strategies, tuple(boundary.get(v) or inside[v] for v in op.inputs)))
        for port, v in enumerate(op.outputs):
            inside[v] = ("op", k, port)
    shapes = tuple(value_signature(graph.values[v]) for i in group.operations for v in graph.operations[i].outputs)
    return (
        group.phase, tuple(rows), shapes, tuple(value_signature(graph.values[v]) for v in group.inputs),
        tuple(inside[v] for v in group.outputs),
    )


def classes_of(
    groups: Sequence[OpGroup], graph: PlacementGraph, fold: bool = True, marks: Sequence[Hashable] | None = None
) -> tuple[list[int], list[str]]:
    """(class of every group, name of every class). Classes are numbered in order of appearance.

    marks: one per group; equal within a class.
    """
    numbers: dict[Hashable, int] = {}
    names: list[str] = []
    signatures: dict[Hashable, int] = {}
    seen: dict[Hashable, int] = {}
    result = []
    for group in groups:
        mark = None if marks is None else marks[group.index]
        signature = signatures.setdefault((group_signature(group, graph), mark), len(signatures))
        place = (group.block, signature)
        ordinal = seen.get(place, 0)
        seen[place] = ordinal + 1
        key: Hashable = (block_class(group.block), signature, ordinal) if fold else group.index
        if key not in numbers:
            numbers[key] = len(numbers)
            lead = next((graph.operations[i] for i in group.operations if graph.operations[i].heavy),
                        graph.operations[group.operations[0]])
            where = block_class(group.block)
            names.append(f"{where}:{lead.name}" if where else lead.name)
        result.append(numbers[key])
    return result, names
