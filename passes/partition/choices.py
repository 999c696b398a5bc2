"""Choices of a group on a whole mesh: one joint strategy per axis, whether they fit, what they cost together."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout, local_bytes
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.partition.groups import Group
from passes.partition.joint import Joint, join
from passes.partition.redistribution import CollectivePrices, change
from passes.rules.base import REPLICATE, Strategy


class Prices(CollectivePrices, Protocol):
    """What building a problem needs to know of the devices; `passes.costs` provides it."""

    def compute_us(self, flops: float, nbytes: float, dtype: str, kind: str) -> float: ...

    def operation_us(
        self, graph: PlacementGraph, op: Operation, inputs: Sequence[Layout], made: Sequence[Layout],
        sizes: tuple[int, ...], flops: float, nbytes: float,
    ) -> float:
        """A heavy operation on one rank's parts of its operands, of which `flops` and `nbytes` follow."""
        ...

    def optimizer_us(self, elements: float, dtype: str) -> float: ...


@dataclass(frozen=True)
class GroupChoice:
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    operations: tuple[OperationLayouts, ...]
    cost_us: float


AxisRule = Callable[[Operation, Strategy], bool]


def group_choices(
    group: Group, graph: PlacementGraph, sizes: tuple[int, ...], prices: Prices, rules: Sequence[AxisRule]
) -> list[GroupChoice]:
    """All choices on a mesh of `sizes`, the cheapest for each boundary, in a fixed order."""
    us_per_byte = prices.copy_us(1e9) / 1e9
    us_per_flop = prices.compute_us(1e12, 0.0, "float32", "matmul") / 1e12
    joints: list[list[Joint]] = []
    for axis, size in enumerate(sizes):
        joints.append(join(
            group, graph, size, lambda b, axis=axis: prices.collective_us("all_reduce", axis, b),
            us_per_byte, us_per_flop, rules[axis],
        ))
    operations = [graph.operations[i] for i in group.operations]
    best: dict[tuple, GroupChoice] = {}
    for combination in itertools.product(*joints):
        layouts = _layouts(operations, combination)
        if not _fits(operations, layouts, graph, sizes, prices):
            continue
        inputs = tuple(tuple(j.inputs[k] for j in combination) for k in range(len(group.inputs)))
        outputs = tuple(tuple(j.outputs[k] for j in combination) for k in range(len(group.outputs)))
        cost = group_cost(group, operations, layouts, inputs, outputs, graph, sizes, prices)
        key = (inputs, outputs)
        if key not in best or best[key].cost_us > cost:
            best[key] = GroupChoice(inputs, outputs, layouts, cost)
    return list(best.values())


def _layouts(operations: Sequence[Operation], combination: Sequence[Joint]) -> tuple[OperationLayouts, ...]:
    rows = []
    for k, op in enumerate(operations):
        steps = [j.steps[k] for j in combination]
        if not steps:  # one device, no axes
            rows.append(OperationLayouts(((),) * len(op.inputs), ((),) * len(op.outputs), ((),) * len(op.outputs)))
            continue
        made = tuple(zip(*(s.strategy.outputs for s in steps)))
        rows.append(OperationLayouts(
            tuple(zip(*(s.strategy.inputs for s in steps))), made,
            tuple(zip(*(s.placed() for s in steps))) if any(any(s.reduced) for s in steps) else made,
        ))
    return tuple(rows)


def slices(value, source: Layout, target: Layout, sizes: tuple[int, ...], prices) -> list[Layout] | None:
    """Layouts on the way from `source` to `target` where only replicated axes get split, outer axes first."""
    way, layout = [], source
    for axis in range(len(sizes)):
        if layout[axis] != target[axis]:
            step = change(value, layout, axis, target[axis], sizes, prices) if layout[axis] == REPLICATE else None
            if step is None:
                return None
            layout = step.target
            way.append(layout)
    return way


def _fits(operations, layouts, graph, sizes, prices) -> bool:
    if len(sizes) < 2:
        return True
    known: dict[int, Layout] = {}
    for op, row in zip(operations, layouts):
        for v, wanted in zip(op.inputs, row.inputs):
            if not _divisible(graph.values[v], wanted, sizes):
                return False
            have = known.setdefault(v, wanted)
            if have != wanted and slices(graph.values[v], have, wanted, sizes, prices) is None:
                return False
        for v, made, after in zip(op.outputs, row.made, row.outputs):
            if not _divisible(graph.values[v], made, sizes):
                return False
            known[v] = after
    return True


def _divisible(value, layout: Layout, sizes: tuple[int, ...]) -> bool:
    first = layout[0]
    if not isinstance(first, tuple) or first not in layout[1:]:
        return True  # one axis alone was checked when joining
    total = 1
    for p, n in zip(layout, sizes):
        if p == first:
            total *= n
    return value.factors[first[0]][first[1]] % total == 0


def operation_share(row: OperationLayouts, sizes: tuple[int, ...]) -> float:
    """Fraction of the whole operation's work that one rank does."""
    share = 1.0
    for axis, n in enumerate(sizes):
        if any(isinstance(layout[axis], tuple) for layout in (*row.inputs, *row.made)):
            share /= n
    return share


def group_cost(group, operations, layouts, inputs, outputs, graph, sizes, prices) -> float:
    """Heavy operations by roofline; light groups as one fused kernel that reads and writes the boundary once."""
    cost = 0.0
    heavy = False
    for op, row in zip(operations, layouts):
        if op.heavy:
            heavy = True
            nbytes = sum(local_bytes(graph.values[v], p, sizes) for v, p in zip(op.inputs, row.inputs))
            nbytes += sum(local_bytes(graph.values[v], p, sizes) for v, p in zip(op.outputs, row.made))
            flops = op.flops * operation_share(row, sizes)
            cost += prices.operation_us(graph, op, row.inputs, row.made, sizes, flops, nbytes)
        for v, made, after in zip(op.outputs, row.made, row.outputs):
            for axis in range(len(sizes)):
                if made[axis] != after[axis]:
                    cost += prices.collective_us("all_reduce", axis, local_bytes(graph.values[v], made, sizes))
    if not heavy and any(op.kind != "view" for op in operations):
        nbytes = sum(local_bytes(graph.values[v], p, sizes) for v, p in zip(group.inputs, inputs))
        nbytes += sum(local_bytes(graph.values[v], p, sizes) for v, p in zip(group.outputs, outputs))
        cost += prices.compute_us(0.0, nbytes, "float32", "pointwise")
    return cost
