"""The cost and the bytes of a decision, recomputed on the unfolded graph.

Walks the layouts that the rewrite will obey, operation by operation and hop by hop, with the prices of single kernels
and collectives. It knows nothing of classes, multiplicities, choices, edges or the solver: agreement with the
solver's objective says that folding, building and decoding are sound. Checked on every solve.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.decision import Decision, Route
from passes.layouts import Layout, local_bytes
from passes.partition.build import StateModel
from passes.partition.choices import Prices
from passes.partition.clusters import Cluster
from passes.partition.redistribution import change
from passes.placement_graph import PlacementGraph


@dataclass(frozen=True)
class Cost:
    compute_us: float
    communication_us: float
    optimizer_us: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float

    @property
    def step_us(self) -> float:
        return self.compute_us + self.communication_us + self.optimizer_us

    @property
    def held_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


class _Walk:
    def __init__(self, graph: PlacementGraph, decision: Decision, prices: Prices):
        self.graph, self.decision, self.prices, self.sizes = graph, decision, prices, decision.sizes

    def local(self, v: int, layout: Layout) -> float:
        return local_bytes(self.graph.values[v], layout, self.sizes)

    def share(self, layouts: Sequence[Layout]) -> float:
        share = 1.0
        for axis, n in enumerate(self.sizes):
            share /= n if any(not isinstance(p[axis], str) for p in layouts) else 1
        return share

    def operation_us(self, index: int) -> float:
        """A heavy operation on its local operands."""
        op, rows = self.graph.operations[index], self.decision.operations[index]
        moved = sum(self.local(v, p) for v, p in zip((*op.inputs, *op.outputs), rows.inputs + rows.made))
        return self.prices.compute_us(
            op.flops * self.share(rows.inputs + rows.made), moved, self.graph.values[op.outputs[0]].spec.dtype, op.kind)

    def reductions_us(self, index: int) -> float:
        op, rows = self.graph.operations[index], self.decision.operations[index]
        return sum(
            self.prices.collective_us("all_reduce", axis, self.local(v, made))
            for v, made, after in zip(op.outputs, rows.made, rows.outputs)
            for axis in range(len(self.sizes)) if made[axis] != after[axis]
        )

    def way_us(self, route: Route, count: int | None = None) -> float:
        """The first `count` hops of a route."""
        layout, total = route.source, 0.0
        for hop in route.hops[:count]:
            (axis,) = [a for a in range(len(self.sizes)) if layout[a] != hop.layout[a]]
            step = change(self.graph.values[route.value], layout, axis, hop.layout[axis], self.sizes, self.prices)
            assert step is not None, f"illegal step from {layout} to {hop.layout}"
            total += step.cost_us
            layout = hop.layout
        return total


def reprice(
    graph: PlacementGraph, clusters: Sequence[Cluster], saved: frozenset[int], decision: Decision, prices: Prices,
    state: StateModel, ways: Sequence[tuple[Route, int, int, bool]],
) -> Cost:
    """Cost of a decision.

    `ways`: (route, first hop, hop after the last, whether its end is saved) of every way that is paid for by itself: a
    shared copy pays its way once, a reader its own from there.
    """
    walk = _Walk(graph, decision, prices)
    compute = communication = 0.0
    activations: dict[int, float] = {}
    for c in clusters:
        operations = [graph.operations[i] for i in c.operations]
        heavy = [op for op in operations if op.heavy]
        compute += sum(walk.operation_us(op.index) for op in heavy)
        communication += sum(walk.reductions_us(op.index) for op in operations)
        layouts: dict[int, Layout] = {}
        first: dict[int, Layout] = {}
        for op in operations:
            rows = decision.operations[op.index]
            for v, p in zip(op.inputs, rows.inputs):
                first.setdefault(v, p)
            layouts.update(zip(op.outputs, rows.outputs))
        if not heavy and any(op.kind != "view" for op in operations):
            moved = sum(walk.local(v, first[v]) for v in c.inputs) + sum(walk.local(v, layouts[v]) for v in c.outputs)
            compute += prices.compute_us(0.0, moved, "float32", "pointwise")
        activations.update({v: walk.local(v, p) for v, p in layouts.items() if v in saved})
    for route, start, stop, kept in ways:
        communication += walk.way_us(route, stop) - walk.way_us(route, start)
        if kept and route.value in saved:
            activations[route.value] = walk.local(route.value, route.target)
    parameters = gradients = optimizer_bytes = optimizer = 0.0
    trained = {p for _, p in graph.outputs if p is not None}
    for v, layout in decision.inputs.items():
        value = graph.values[v]
        if value.kind != "parameter":
            continue
        held = walk.local(v, layout)
        parameters += held
        if v in trained:
            gradients += held * state.gradient
            optimizer_bytes += held * state.optimizer
            optimizer += prices.optimizer_us(held / value.spec.itemsize, value.spec.dtype)
    return Cost(compute, communication, optimizer, parameters, gradients, optimizer_bytes, sum(activations.values()))
