"""Product of joint strategies over the axes of a mesh, for one group: layouts, compatibility, cost.

There may be thousands of combinations, which differ in few operations. So prices are cached per operation.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from passes.cost_model.cost_terms import Prices, price
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout, legal, local_bytes
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.axis import Axes
from passes.op_rules.base import REPLICATE, Placement
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.pricing.decision_terms import LocalSizes, fused_kernel, group_kernels, is_fused_kernel, reduction_messages
from passes.sharding.pricing.redistribution import after_hop
from passes.sharding.strategies.group_strategies import GroupStrategy, OperationStrategy

Combination = tuple[GroupStrategy, ...]
Ports = tuple[tuple[Layout, ...], tuple[Layout, ...]]


def _layouts(op: Operation, taken: Sequence[OperationStrategy]) -> OperationLayouts:
    if not taken:  # one device, no axes
        return OperationLayouts(((),) * len(op.inputs), ((),) * len(op.outputs), ((),) * len(op.outputs))
    made = tuple(zip(*(s.strategy.outputs for s in taken)))
    return OperationLayouts(
        tuple(zip(*(s.strategy.inputs for s in taken))), made,
        tuple(zip(*(s.placed() for s in taken))) if any(any(s.reduced) for s in taken) else made,
    )


class StrategyProduct:
    """Combinations of one group on these axes, with their prices."""

    def __init__(self, group: OpGroup, graph: PlacementGraph, axes: Axes, prices: Prices):
        self.group, self.graph, self.axes, self.prices = group, graph, axes, prices
        self.operations = [graph.operations[i] for i in group.operations]
        self.sizes, self.fused = LocalSizes(axes), is_fused_kernel(self.operations)
        self.heavy = frozenset(k for k, op in enumerate(self.operations) if op.heavy)
        self._bytes: dict[tuple[int, Layout], float] = {}
        self._costs: dict[tuple[int, ...], tuple[Combination, float]] = {}
        """By ids of joint strategies, which are kept alive with them."""
        self._prices: dict[tuple[int, ...], float] = {}
        self._rows: dict[tuple[int, ...], OperationLayouts] = {}
        self._reduces: dict[int, frozenset[int]] = {}
        self._splits: dict[int, dict[tuple[int, int, tuple[int, int]], int]] = {}
        self._sliced: dict[int, dict[tuple[int, int], Placement]] = {}
        self._devices = prod(axis.size for axis in axes)
        self._kept: list[GroupStrategy] = []
        """Keeps alive the joint strategies whose ids are keys above."""

    def ports(self, combination: Combination) -> Ports:
        if not combination:
            return ((),) * len(self.group.inputs), ((),) * len(self.group.outputs)
        return (tuple(zip(*(joint.inputs for joint in combination))), tuple(zip(*(joint.outputs for joint in combination))))

    def bytes(self, v: int, layout: Layout) -> float:
        """Bytes on one device."""
        key = v, layout
        if key not in self._bytes:
            self._bytes[key] = local_bytes(self.graph.values[v], layout, self.axes)
        return self._bytes[key]

    def cost(self, combination: Combination) -> float:
        """Cost of its kernels, and of reductions inside."""
        key = tuple(map(id, combination))
        if key not in self._costs:
            self._costs[key] = combination, self._cost(combination)
        return self._costs[key][1]

    def _cost(self, combination: Combination) -> float:
        total = 0.0
        if self.fused:
            inputs, outputs = self.ports(combination)
            values = self.graph.values
            boundary = [(values[v], p) for v, p in zip((*self.group.inputs, *self.group.outputs), inputs + outputs)]
            total += price(fused_kernel(boundary, _CachedSizes(self)), self.prices)
        for k in sorted(self.heavy.union(*(self._reduces_of(joint) for joint in combination))):
            total += self._operation(k, self.operations[k], [joint.operations[k] for joint in combination])
        return total

    def layouts(self, combination: Combination) -> tuple[OperationLayouts, ...]:
        """Layouts of all its operations."""
        return tuple([self._layouts(k, op, [joint.operations[k] for joint in combination])
                      for k, op in enumerate(self.operations)])

    def _layouts(self, k: int, op: Operation, taken: Sequence[OperationStrategy]) -> OperationLayouts:
        key = (k, *map(id, taken))
        if key not in self._rows:
            self._rows[key] = _layouts(op, taken)
        return self._rows[key]

    def _reduces_of(self, joint: GroupStrategy) -> frozenset[int]:
        """Indices of the operations that reduce a result at once."""
        if id(joint) not in self._reduces:
            self._kept.append(joint)
            self._reduces[id(joint)] = frozenset(k for k, taken in enumerate(joint.operations) if any(taken.reduced))
        return self._reduces[id(joint)]

    def _operation(self, k: int, op: Operation, taken: Sequence[OperationStrategy]) -> float:
        key = (k, *map(id, taken))
        if key not in self._prices:
            rows = {op.index: self._layouts(k, op, taken)}
            kernels = group_kernels(self.graph, [op], rows, (), self.sizes, self.prices.keyed) if op.heavy else {}
            messages = (message for _, message in reduction_messages(self.graph, op, rows[op.index], self.sizes))
            self._prices[key] = sum(price(term, self.prices) for term in (*kernels.values(), *messages))
        return self._prices[key]

    def saved_bytes(self, combination: Combination) -> float:
        """Upper bound of the bytes of its results that are saved for backward."""
        return sum(
            self.bytes(v, tuple(joint.operations[k].placed()[port] for joint in combination))
            for k, op in enumerate(self.operations) for port, v in enumerate(op.outputs) if v in self.graph.saved)

    def fits(self, combination: Combination) -> bool:
        """True if the axes divide all factors that they split, and shards can be sliced out of the available layouts."""
        if len(combination) < 2:
            return True
        return self._divides(combination) and self._slices(combination)

    def _divides(self, combination: Combination) -> bool:
        if any(axis.rows for axis in self.axes):
            return all(
                legal(self.graph.values[v], layout, self.axes)
                for k, op in enumerate(self.operations)
                for v, layout in zip((*op.inputs, *op.outputs), zip(*(
                    joint.operations[k].strategy.inputs + joint.operations[k].strategy.outputs for joint in combination))))
        total: dict[tuple[int, int, tuple[int, int]], int] = {}
        for axis, joint in zip(self.axes, combination):
            for each, size in self._splits_of(joint).items():
                total[each] = parts = total.get(each, 1) * axis.size
                if size % parts:
                    return False
        return True

    def _splits_of(self, joint: GroupStrategy) -> dict[tuple[int, int, tuple[int, int]], int]:
        """(operation, operand or result, split factor) -> its size, where all devices together do not divide it. By operand,
        since two operations may read different shards of a value from outside."""
        if id(joint) not in self._splits:
            self._kept.append(joint)
            splits = {(k, position, p): self.graph.values[v].factors[p[0]][p[1]]
                      for k, (op, taken) in enumerate(zip(self.operations, joint.operations))
                      for position, (v, p) in enumerate(zip((*op.inputs, *op.outputs),
                                                            taken.strategy.inputs + taken.strategy.outputs))
                      if isinstance(p, tuple)}
            self._splits[id(joint)] = {key: size for key, size in splits.items() if size % self._devices}
        return self._splits[id(joint)]

    def _slices(self, combination: Combination) -> bool:
        """Check all reads where, on some axis, a replicated value is read as a shard."""
        sliced = [self._sliced_of(joint) for joint in combination]
        for k, position in dict.fromkeys(key for each in sliced for key in each):
            wanted = tuple(joint.operations[k].strategy.inputs[position] for joint in combination)
            have = tuple(each.get((k, position), p) for each, p in zip(sliced, wanted))
            value = self.graph.values[self.operations[k].inputs[position]]
            way = [have, *_way(have, wanted)]
            if not all(after_hop(value, layout, _changed(layout, after), after[_changed(layout, after)], self.axes) == after
                       for layout, after in pairwise(way)):
                return False
            if not legal(value, have, self.axes):
                return False
        return True

    def _sliced_of(self, joint: GroupStrategy) -> dict[tuple[int, int], Placement]:
        """(operation, operand) -> the available placement, where a different shard is read."""
        if id(joint) not in self._sliced:
            self._kept.append(joint)
            there = dict(zip(self.group.inputs, joint.inputs))
            found = {}
            for k, (op, taken) in enumerate(zip(self.operations, joint.operations)):
                found.update({(k, position): there[v] for position, (v, p) in enumerate(zip(op.inputs, taken.strategy.inputs))
                              if there[v] != p})
                there.update(zip(op.outputs, taken.placed()))
            self._sliced[id(joint)] = found
        return self._sliced[id(joint)]


class _CachedSizes(LocalSizes):
    """Bytes of values, cached by group."""

    def __init__(self, combined: StrategyProduct):
        super().__init__(combined.axes)
        self.combined = combined

    def bytes(self, parts) -> float:
        return sum(self.combined.bytes(value.index, layout) for value, layout in parts)


def _way(have: Layout, wanted: Layout) -> Iterator[Layout]:
    """Layouts between the two, outer axes first."""
    layout = have
    for axis, p in enumerate(wanted):
        if layout[axis] != p:
            assert layout[axis] == REPLICATE, "sharded values are read as they are"
            layout = (*layout[:axis], p, *layout[axis + 1:])
            yield layout


def _changed(layout: Layout, after: Layout) -> int:
    return next(axis for axis, (p, q) in enumerate(zip(layout, after)) if p != q)
