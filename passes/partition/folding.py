"""Classes of clusters that choose alike: the repetitions of a block share one decision.

Two clusters are of one class if they do the same (operations, strategies, shapes, factors, wiring), in the same phase,
at the same place of repetitions of one block, and keep the same of their values for backward. Tying decisions narrows
the choice, it never changes a price: what a class chooses is charged once per instance, so the objective is exactly
the cost of the unfolded graph.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence

from passes.graph.placement_graph import PlacementGraph, Value, block_class
from passes.partition.groups import Cluster


def value_signature(value: Value) -> Hashable:
    return value.spec, value.factors, value.kind, value.trainable, value.batch


def cluster_signature(cluster: Cluster, graph: PlacementGraph) -> Hashable:
    boundary = {v: ("in", k) for k, v in enumerate(cluster.inputs)}
    inside: dict[int, tuple] = {}
    rows = []
    for k, index in enumerate(cluster.operations):
        op = graph.operations[index]
        rows.append((op.target, op.flops, op.strategies, tuple(boundary.get(v) or inside[v] for v in op.inputs)))
        for port, v in enumerate(op.outputs):
            inside[v] = ("op", k, port)
    shapes = tuple(value_signature(graph.values[v]) for i in cluster.operations for v in graph.operations[i].outputs)
    return (
        cluster.backward, tuple(rows), shapes, tuple(value_signature(graph.values[v]) for v in cluster.inputs),
        tuple(inside[v] for v in cluster.outputs),
    )


def classes_of(
    clusters: Sequence[Cluster], graph: PlacementGraph, fold: bool = True, marks: Sequence[Hashable] | None = None
) -> tuple[list[int], list[str]]:
    """(class of every cluster, name of every class). Classes are numbered in order of appearance.

    marks: one per cluster; those of one class are equal.
    """
    numbers: dict[Hashable, int] = {}
    names: list[str] = []
    signatures: dict[Hashable, int] = {}
    seen: dict[Hashable, int] = {}
    result = []
    for cluster in clusters:
        mark = None if marks is None else marks[cluster.index]
        signature = signatures.setdefault((cluster_signature(cluster, graph), mark), len(signatures))
        place = (cluster.block, signature)
        ordinal = seen.get(place, 0)
        seen[place] = ordinal + 1
        key: Hashable = (block_class(cluster.block), signature, ordinal) if fold else cluster.index
        if key not in numbers:
            numbers[key] = len(numbers)
            lead = next((graph.operations[i] for i in cluster.operations if graph.operations[i].heavy),
                        graph.operations[cluster.operations[0]])
            where = block_class(cluster.block)
            names.append(f"{where}:{lead.name}" if where else lead.name)
        result.append(numbers[key])
    return result, names
