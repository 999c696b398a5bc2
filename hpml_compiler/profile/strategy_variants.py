"""Local variants of a traced model's heavy operations: one call per strategy and mesh."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from passes.cost_model.measured.measurement_key import measurement_key_of
from passes.graph.layouts import Layout, legal, local_shape
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.axis import Axes, Axis
from passes.hardware.mesh import AXIS_NAMES, factorizations
from passes.op_rules.base import REPLICATE

MOST_STRATEGIES = 64
"""Combinations of strategies per operation and mesh; the rest are unlikely to be used."""


@dataclass(frozen=True)
class StrategyVariant:
    """An operation on local operands. inputs, outputs: local shapes, in the order of the operation's values."""

    key: str
    node: fx.Node
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def mesh_axes(ranks: int) -> list[Axes]:
    """Axes of all meshes with one or two axes over that many ranks; no axes for one rank."""
    if ranks == 1:
        return [()]
    shapes = [shape for count in (1, 2) for shape in factorizations(ranks, count)]
    return [tuple(map(Axis, AXIS_NAMES, shape)) for shape in shapes]


def variants(gm: GraphModule, graph: PlacementGraph, ranks: int) -> dict[str, StrategyVariant]:
    """Variants by key for all meshes over `ranks`, including the unsharded operations."""
    nodes = {node.name: node for node in gm.graph.nodes}
    found: dict[str, StrategyVariant] = {}
    for op in graph.operations:
        if not op.heavy or not op.outputs:
            continue
        for axes in mesh_axes(ranks):
            for inputs, made in _layouts(op, graph, axes):
                key = measurement_key_of(graph, op, inputs, made, axes)
                if key not in found:
                    found[key] = _variant(key, nodes[op.name], op, graph, inputs, made, axes)
    return found


def _layouts(op: Operation, graph: PlacementGraph, axes: Axes,
             ) -> Iterator[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    whole = (REPLICATE,) * len(axes)
    yield (whole,) * len(op.inputs), (whole,) * len(op.outputs)
    for combination in itertools.islice(itertools.product(op.strategies, repeat=len(axes)), MOST_STRATEGIES):
        if not combination:
            continue
        inputs = tuple(zip(*(s.inputs for s in combination)))
        made = tuple(zip(*(s.outputs for s in combination)))
        if all(legal(graph.values[v], p, axes) for v, p in zip((*op.inputs, *op.outputs), inputs + made)):
            yield inputs, made


def _variant(key: str, node: fx.Node, op: Operation, graph: PlacementGraph, inputs: Sequence[Layout],
             made: Sequence[Layout], axes: Axes) -> StrategyVariant:
    def shapes(values: Sequence[int], layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
        return tuple(local_shape(graph.values[v], p, axes) for v, p in zip(values, layouts))

    return StrategyVariant(key, node, shapes(op.inputs, inputs), shapes(op.outputs, made))
