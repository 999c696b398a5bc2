"""Choices of a group on a whole mesh: one joint strategy per axis, whether they are compatible, their total cost.

Axes are combined one after another. Above `MOST_COMBINED` combinations,
`passes.sharding.strategies.strategy_pruning` drops dominated ones before the next axis is added. The solver's bound holds for
the choices that it is given.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from passes.cost_model.cost_terms import Prices, copy
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.hardware.axis import Axes
from passes.op_rules.base import REPLICATE, Strategy, parse_placement
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.pricing.redistribution import after_hop
from passes.sharding.strategies.group_strategies import Ends, GroupStrategy, GroupStrategyCache, strategies_on_axis
from passes.sharding.strategies.strategy_product import Combination, StrategyProduct
from passes.sharding.strategies.strategy_pruning import SubMeshPrices, undominated
from passes.solver.work_limit import WorkLimit

MOST_COMBINED = 1000
"""Limit of combinations of joint strategies that are priced; beyond it, dominated ones are dropped."""
MOST_OFFERED = 400
"""Limit of choices of a group with more than `MOST_COMBINED` combinations: the cheapest."""
FEW = 6
"""Joint strategies per axis once the time limit is over: the cheapest, and the replicated one."""


Pin = tuple[tuple[str | None, ...], tuple[str | None, ...]]
"""Labels of a choice's inputs and outputs."""
FREE = "*"
"""In place of a label in a pin: any will do."""


@dataclass(frozen=True)
class MeshStrategy:
    """combination: the joint strategies that it consists of. combined: the group's combinations on the same axes."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    cost: float
    combination: Combination = field(repr=False)
    combined: StrategyProduct = field(repr=False)

    def operations(self) -> tuple[OperationLayouts, ...]:
        """Layouts of all operations, computed on demand: few choices need them."""
        return self.combined.layouts(self.combination)

    def made(self, operation: int, port: int) -> Layout:
        """The layout of a result, by the operation's position in the group."""
        return tuple(joint.operations[operation].placed()[port] for joint in self.combination)


def fits(pin: Pin, inputs: Sequence[str | None], outputs: Sequence[str | None]) -> bool:
    """True if a choice with these labels is one that the pin wants."""
    wanted, labels = (*pin[0], *pin[1]), (*inputs, *outputs)
    return len(pin[0]) == len(inputs) and len(pin[1]) == len(outputs) and all(
        want in (FREE, label) for want, label in zip(wanted, labels))


AxisRule = Callable[[Operation, Strategy], bool]


def any_strategy(op: Operation, strategy: Strategy) -> bool:
    """The rule of an axis that constrains nothing."""
    return True


def strategies_on_mesh(
    group: OpGroup, graph: PlacementGraph, axes: Axes, prices: Prices, rules: Sequence[AxisRule],
    wanted: Pin | None = None, allowance: WorkLimit | None = None, known: GroupStrategyCache | None = None,
) -> list[MeshStrategy]:
    """Choices on these axes, the cheapest for each boundary, in a fixed order. wanted: labels of inputs and outputs that must
    be included; other choices may be left out. allowance: once it is spent, there are few. known: joint strategies of equal
    groups."""
    allowance, known = allowance or WorkLimit(math.inf), known or GroupStrategyCache()
    number = known.numbers.of(group, graph)
    cost_per_byte = copy(1e9, prices) / 1e9
    cost_per_flop = prices.kernel(1e12, 0.0, "float32", "matmul") / 1e12
    joints: list[list[GroupStrategy]] = []
    for k, axis in enumerate(axes):
        reduce_cost = partial(prices.collective, "all_reduce", k)
        find = partial(strategies_on_axis, group, graph, axis.size, cost_per_byte=cost_per_byte, cost_per_flop=cost_per_flop,
                       allowed=rules[k], allowance=allowance, rows=axis.rows)
        key = (number, axis.size, axis.rows, cost_per_byte, cost_per_flop, allowed(group, graph, rules[k]))
        found = known.find(key, reduce_cost, find, allowance)
        if wanted is not None:
            found = _fitting(found, wanted, k) or find(reduce_cost, ends=_ends(wanted, k)) or found
        joints.append(found)
    if allowance.is_over and wanted is None:
        joints = [_few(found) for found in joints]
    found = StrategyProduct(group, graph, axes, prices)
    combinations = _composed(found, joints, allowance)
    allowance.spend("combination", len(combinations))
    best: dict[tuple, tuple[float, Combination]] = {}
    for combination in combinations:
        if not found.fits(combination):
            continue
        key, cost = found.ports(combination), found.cost(combination)
        if key not in best or best[key][0] > cost:
            best[key] = cost, combination
    return [MeshStrategy(inputs, outputs, cost, combination, found)
            for (inputs, outputs), (cost, combination) in best.items()]


def allowed(group: OpGroup, graph: PlacementGraph, rule: AxisRule) -> tuple[bool, ...]:
    """Strategies of the group's operations that the rule of an axis allows; () if that is all of them anyway."""
    if rule is any_strategy:
        return ()
    operations = [graph.operations[i] for i in group.operations]
    return tuple(rule(op, s) for op in operations for s in op.strategies)


def _fitting(joints: list[GroupStrategy], wanted: Pin, axis: int) -> list[GroupStrategy]:
    """Joint strategies with the wanted placements on an axis."""
    if FREE not in (*wanted[0], *wanted[1]):
        ends = _ends(wanted, axis)
        return [joint for joint in joints if (joint.inputs, joint.outputs) == ends]
    each = [_ends(((label,), ()), axis) for label in (*wanted[0], *wanted[1])]
    return [joint for joint in joints if all(
        label == FREE or ends == ((place,), ()) for label, ends, place in zip(
            (*wanted[0], *wanted[1]), each, (*joint.inputs, *joint.outputs), strict=True))]


def _ends(wanted: Pin, axis: int) -> Ends | None:
    """The wanted placements on an axis; None where the labels are invalid."""
    try:
        inputs, outputs = (tuple(parse_placement((label or "").split(",")[axis]) for label in side) for side in wanted)
    except (ValueError, IndexError):  # `ProblemEntities.pin` reports invalid labels
        return None
    return inputs, outputs


def _few(joints: list[GroupStrategy]) -> list[GroupStrategy]:
    """The cheapest, and the replicated one, without which there might be no assignment."""
    whole = [joint for joint in joints if {*joint.inputs, *joint.outputs} <= {REPLICATE}]
    return [*dict.fromkeys([*joints[:FEW], *whole])] if whole else joints


def _composed(whole: StrategyProduct, joints: Sequence[Sequence[GroupStrategy]], allowance: WorkLimit) -> list[Combination]:
    """One joint strategy per axis; above the limit, the undominated ones."""
    if prod(map(len, joints)) <= MOST_COMBINED:
        return [*itertools.product(*joints)]
    combined: list[Combination] = [()]
    mesh, last = SubMeshPrices(whole.axes, whole.prices), len(joints) - 1
    for k, found in enumerate(joints):
        part = mesh.part(k, k + 1).combined(whole.group, whole.graph)
        alone = undominated([(joint,) for joint in found], part, MOST_COMBINED, allowance)
        combined = [(*taken, *joint) for taken in combined for joint in alone]
        if k > 0:
            part = [whole] if k == last else mesh.part(0, k + 1).combined(whole.group, whole.graph)
            combined = undominated(combined, part, MOST_OFFERED, allowance)
    return combined


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
