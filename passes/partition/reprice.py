"""The cost and the bytes of a decision, recomputed on the unfolded graph.

Walks the layouts that the rewrite will obey, operation by operation and hop by hop, with the prices of single kernels
and collectives. It knows nothing of classes, multiplicities, choices, edges or the solver: agreement with the
solver's objective says that folding, building and decoding are sound. Checked on every solve.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.graph.decision import Decision, Way
from passes.graph.layouts import Layout, local_bytes
from passes.graph.placement_graph import PlacementGraph
from passes.partition.choices import Prices
from passes.partition.groups import Group
from passes.partition.redistribution import bucket_bytes_of, change
from passes.partition.state import StateModel


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


def boundary(graph: PlacementGraph, c: Group, decision: Decision) -> list[tuple[int, Layout]]:
    """What a group reads, as its first reader in it does, and what it makes: values with their layouts."""
    read: dict[int, Layout] = {}
    made: dict[int, Layout] = {}
    for i in c.operations:
        op, rows = graph.operations[i], decision.operations[i]
        for v, layout in zip(op.inputs, rows.inputs):
            read.setdefault(v, layout)
        made.update(zip(op.outputs, rows.outputs))
    return [*((v, read[v]) for v in c.inputs), *((v, made[v]) for v in c.outputs)]


class _Walk:
    def __init__(self, graph: PlacementGraph, decision: Decision, prices: Prices, bucket_bytes: float):
        self.graph, self.decision, self.prices, self.sizes = graph, decision, prices, decision.sizes
        self.bucket_bytes = bucket_bytes

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
        flops = op.flops * self.share(rows.inputs + rows.made)
        return self.prices.operation_us(self.graph, op, rows.inputs, rows.made, self.sizes, flops, moved)

    def group_us(self, c: Group) -> float:
        """Its heavy operations one by one, or its light ones as one kernel that reads and writes the boundary."""
        operations = [self.graph.operations[i] for i in c.operations]
        heavy = [op.index for op in operations if op.heavy]
        if heavy or all(op.kind == "view" for op in operations):
            return sum(map(self.operation_us, heavy))
        moved = sum(self.local(v, p) for v, p in boundary(self.graph, c, self.decision))
        return self.prices.compute_us(0.0, moved, "float32", "pointwise")

    def reductions_us(self, index: int) -> float:
        op, rows = self.graph.operations[index], self.decision.operations[index]
        return sum(
            self.prices.collective_us("all_reduce", axis, self.local(v, made))
            for v, made, after in zip(op.outputs, rows.made, rows.outputs)
            for axis in range(len(self.sizes)) if made[axis] != after[axis]
        )

    def way_us(self, way: Way) -> float:
        """The hops of a way; where it ends at the optimizer, its reductions share a collective with others."""
        route, total = way.route, 0.0
        for k in range(way.start, way.stop):
            layout, after = route.layout(k), route.hops[k].layout
            (axis,) = [a for a in range(len(self.sizes)) if layout[a] != after[a]]
            step = change(self.graph.values[route.value], layout, axis, after[axis], self.sizes, self.prices,
                          self.bucket_bytes if way.gradient else 0.0)
            assert step is not None, f"illegal step from {layout} to {after}"
            total += step.cost_us
        return total


def compute_us(graph: PlacementGraph, c: Group, decision: Decision, prices: Prices) -> float:
    """Cost of the kernels of one group, without its collectives."""
    return _Walk(graph, decision, prices, 0.0).group_us(c)


def reprice(
    graph: PlacementGraph, groups: Sequence[Group], saved: frozenset[int], decision: Decision, prices: Prices,
    state: StateModel, ways: Sequence[Way], bucket_bytes: float | None = None,
) -> Cost:
    """Cost of a decision.

    `ways`: what is paid for by itself: a shared copy pays its way once, a reader its own from there. `bucket_bytes`: of
    gradients that are reduced together (None: as the graph says).
    """
    walk = _Walk(graph, decision, prices, bucket_bytes_of(graph) if bucket_bytes is None else bucket_bytes)
    compute = communication = 0.0
    activations: dict[int, float] = {}
    for c in groups:
        compute += walk.group_us(c)
        communication += sum(walk.reductions_us(i) for i in c.operations)
        layouts = {v: p for i in c.operations
                   for v, p in zip(graph.operations[i].outputs, decision.operations[i].outputs)}
        activations.update({v: walk.local(v, p) for v, p in layouts.items() if v in saved})
    for way in ways:
        communication += walk.way_us(way)
        if way.saved and way.route.value in saved:
            activations[way.route.value] = walk.local(way.route.value, way.route.target)
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
