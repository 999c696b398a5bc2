"""A decision that nobody would take: for every operation one of its strategies at random, on every axis of a mesh."""
from __future__ import annotations

import random
from collections.abc import Sequence

from passes.cost_model.algebra import NUMBERS
from passes.graph.decision import Decision, Hop, OperationLayouts, Route
from passes.graph.layouts import Layout, legal
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD, Phase
from passes.hardware.axis import Axes
from passes.json_records import FrozenMap
from passes.op_rules.base import REPLICATE, Strategy
from passes.sharding.pricing.redistribution import cheapest_route


class Free:
    """Prices: all routes cost alike, so the shortest is taken."""

    algebra, keyed = NUMBERS, False

    def kernel(self, flops: float, nbytes: float, dtype: str, kind: str, key: str = "") -> float:
        return 0.0

    def collective(self, kind: str, axis: int, nbytes: float) -> float:
        return 1.0

    def update(self, elements: float, dtype: str) -> float:
        return 0.0


def route(value: Value, source: Layout, target: Layout, axes: Axes, phase: Phase) -> Route | None:
    found = cheapest_route(value, source, target, axes, Free())
    return None if found is None else Route(value.index, source, tuple(Hop(step.target, phase) for step in found[1]))


def decide(graph: PlacementGraph, axes: Axes, rng: random.Random, tries: int = 12) -> Decision:
    """Inputs and outputs are placed at random too. An operation none of whose tries can be fed is left whole."""
    placed = {value.index: _split(value, axes, rng) for value in graph.values if value.producer is None}
    inputs = FrozenMap(placed)
    operations: dict[int, OperationLayouts] = {}
    routes: dict[tuple[int, int], Route] = {}
    for op in graph.operations:
        for attempt in range(tries + 1):
            whole = attempt == tries
            strategies = [op.strategies[0] if whole else _choose(op.strategies, rng) for _ in axes]
            fed = _feed(graph, op, strategies, placed, axes)
            if fed is not None:
                operations[op.index], ways = fed
                routes.update({(op.index, k): way for k, way in enumerate(ways)})
                break
    outputs = []
    for v, _ in graph.outputs:
        value = graph.values[v]
        way = route(value, placed[v], _split(value, axes, rng), axes, BACKWARD)
        way = way or route(value, placed[v], (REPLICATE,) * len(axes), axes, BACKWARD)
        assert way is not None
        outputs.append(way)
    return Decision(axes, inputs, FrozenMap(operations), FrozenMap(routes), tuple(outputs))


def _choose(strategies: Sequence[Strategy], rng: random.Random) -> Strategy:
    """Mostly one that splits, if there is one."""
    splits = [s for s in strategies if s.splits]
    return rng.choice(splits if splits and rng.random() < 0.8 else strategies)


def _split(value: Value, axes: Axes, rng: random.Random) -> Layout:
    places = [REPLICATE, *((d, k) for d, row in enumerate(value.factors) for k in range(len(row))
                           if (d, k) not in value.microbatch)]
    layout = tuple(rng.choice(places) for _ in axes)
    return layout if legal(value, layout, axes) else (REPLICATE,) * len(axes)


def _feed(graph: PlacementGraph, op: Operation, strategies: list[Strategy], placed: dict[int, Layout],
          axes: Axes) -> tuple[OperationLayouts, list[Route]] | None:
    """Take these strategies, one per axis, if they divide and every operand can be brought where they want it."""
    inputs = [tuple(s.inputs[k] for s in strategies) for k in range(len(op.inputs))]
    made = [tuple(s.outputs[k] for s in strategies) for k in range(len(op.outputs))]
    ports = [*zip(op.inputs, inputs), *zip(op.outputs, made)]
    if not all(legal(graph.values[v], layout, axes) for v, layout in ports):
        return None
    ways = [route(graph.values[v], placed[v], layout, axes, op.phase) for v, layout in zip(op.inputs, inputs)]
    found = [way for way in ways if way is not None]
    if len(found) < len(ways):
        return None
    placed.update(zip(op.outputs, made))
    return OperationLayouts(tuple(inputs), tuple(made), tuple(made)), found
