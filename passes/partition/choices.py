"""Choices of a group on a whole mesh: one joint strategy per axis, whether they fit, what they cost together."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.costs.terms import Prices, copy, price
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.machine.axis import Axes
from passes.partition.charges import LocalSizes, group_terms
from passes.partition.groups import Group
from passes.partition.joint import Joint, join
from passes.partition.redistribution import after_hop
from passes.rules.base import REPLICATE, Strategy


@dataclass(frozen=True)
class GroupChoice:
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    operations: tuple[OperationLayouts, ...]
    cost: float


AxisRule = Callable[[Operation, Strategy], bool]


def group_choices(
    group: Group, graph: PlacementGraph, axes: Axes, prices: Prices, rules: Sequence[AxisRule]
) -> list[GroupChoice]:
    """All choices on these axes, the cheapest for each boundary, in a fixed order."""
    cost_per_byte = copy(1e9, prices) / 1e9
    cost_per_flop = prices.kernel(1e12, 0.0, "float32", "matmul") / 1e12
    joints: list[list[Joint]] = []
    for k, axis in enumerate(axes):
        joints.append(join(
            group, graph, axis.size, lambda b, k=k: prices.collective("all_reduce", k, b),
            cost_per_byte, cost_per_flop, rules[k],
        ))
    operations = [graph.operations[i] for i in group.operations]
    local = LocalSizes(axes)
    best: dict[tuple, GroupChoice] = {}
    for combination in itertools.product(*joints):
        layouts = _layouts(operations, combination)
        if not _fits(operations, layouts, graph, axes):
            continue
        inputs = tuple(tuple(j.inputs[k] for j in combination) for k in range(len(group.inputs)))
        outputs = tuple(tuple(j.outputs[k] for j in combination) for k in range(len(group.outputs)))
        boundary = ((graph.values[v], p) for v, p in zip((*group.inputs, *group.outputs), inputs + outputs))
        rows = dict(zip(group.operations, layouts))
        cost = sum(price(t, prices) for t in group_terms(graph, operations, rows, boundary, local, prices.keyed))
        key = (inputs, outputs)
        if key not in best or best[key].cost > cost:
            best[key] = GroupChoice(inputs, outputs, layouts, cost)
    return list(best.values())


def _layouts(operations: Sequence[Operation], combination: Sequence[Joint]) -> tuple[OperationLayouts, ...]:
    rows = []
    for k, op in enumerate(operations):
        taken = [j.operations[k] for j in combination]
        if not taken:  # one device, no axes
            rows.append(OperationLayouts(((),) * len(op.inputs), ((),) * len(op.outputs), ((),) * len(op.outputs)))
            continue
        made = tuple(zip(*(s.strategy.outputs for s in taken)))
        rows.append(OperationLayouts(
            tuple(zip(*(s.strategy.inputs for s in taken))), made,
            tuple(zip(*(s.placed() for s in taken))) if any(any(s.reduced) for s in taken) else made,
        ))
    return tuple(rows)


def slices(value: Value, source: Layout, target: Layout, axes: Axes) -> list[Layout] | None:
    """Layouts on the way from `source` to `target` where only replicated axes get split, outer axes first."""
    way, layout = [], source
    for axis in range(len(axes)):
        if layout[axis] != target[axis]:
            after = after_hop(value, layout, axis, target[axis], axes) if layout[axis] == REPLICATE else None
            if after is None:
                return None
            layout = after
            way.append(layout)
    return way


def _fits(operations, layouts, graph, axes) -> bool:
    if len(axes) < 2:
        return True
    known: dict[int, Layout] = {}
    for op, row in zip(operations, layouts):
        for v, wanted in zip(op.inputs, row.inputs):
            if not _divisible(graph.values[v], wanted, axes):
                return False
            have = known.setdefault(v, wanted)
            if have != wanted and slices(graph.values[v], have, wanted, axes) is None:
                return False
        for v, made, after in zip(op.outputs, row.made, row.outputs):
            if not _divisible(graph.values[v], made, axes):
                return False
            known[v] = after
    return True


def _divisible(value, layout: Layout, axes: Axes) -> bool:
    first = layout[0]
    if not isinstance(first, tuple) or first not in layout[1:]:
        return True  # one axis alone was checked when joining
    total = 1
    for p, axis in zip(layout, axes):
        if p == first:
            total *= axis.size
    return value.factors[first[0]][first[1]] % total == 0
