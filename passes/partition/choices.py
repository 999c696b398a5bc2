"""Choices of a group on a whole mesh: one joint strategy per axis, whether they fit, what they cost together.

Axes are composed one after another. Where that makes more combinations than `MOST_COMBINED`, what `passes.partition.prune`
finds to be of no use goes before the next axis comes in. A solver's bound is that of the choices which are offered to it.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from passes.costs.terms import Prices, copy
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.machine.axis import Axes
from passes.partition.combined import Combination, Combined
from passes.partition.groups import Group
from passes.partition.joint import Ends, Joint, join
from passes.partition.prune import PartOfMesh, most_useful
from passes.partition.redistribution import after_hop
from passes.rules.base import REPLICATE, Strategy, parse_placement
from passes.solve.allowance import Allowance

MOST_COMBINED = 1000
"""Combinations of joint strategies that are priced; of more, those are dropped that others can replace."""
MOST_OFFERED = 400
"""Choices of a group where there were more than `MOST_COMBINED` combinations: the cheapest."""
FEW = 6
"""Joint strategies on an axis once the time is over: the cheapest, and besides what splits nothing."""


Pin = tuple[tuple[str | None, ...], tuple[str | None, ...]]
"""Labels that a choice reads and makes."""


@dataclass(frozen=True)
class GroupChoice:
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    operations: tuple[OperationLayouts, ...]
    cost: float


AxisRule = Callable[[Operation, Strategy], bool]


def group_choices(
    group: Group, graph: PlacementGraph, axes: Axes, prices: Prices, rules: Sequence[AxisRule],
    wanted: Pin | None = None, allowance: Allowance | None = None,
) -> list[GroupChoice]:
    """Choices on these axes, the cheapest for each boundary, in a fixed order. wanted: labels that the group is to read and
    make; other choices may be left out. allowance: once it is over, there are few."""
    allowance = allowance or Allowance(math.inf)
    cost_per_byte = copy(1e9, prices) / 1e9
    cost_per_flop = prices.kernel(1e12, 0.0, "float32", "matmul") / 1e12
    joints: list[list[Joint]] = []
    for k, axis in enumerate(axes):
        find = partial(join, group, graph, axis.size, lambda b, k=k: prices.collective("all_reduce", k, b),
                       cost_per_byte, cost_per_flop, rules[k], allowance)
        found = find()
        joints.append(found if wanted is None else _fitting(found, wanted, k) or find(ends=_ends(wanted, k)) or found)
    if allowance.is_over and wanted is None:
        joints = [_few(found) for found in joints]
    combinations = _composed(group, graph, PartOfMesh(axes, prices), joints, allowance)
    allowance.spend("combination", len(combinations))
    found = Combined(group, graph, axes, prices)
    best: dict[tuple, tuple[float, Combination]] = {}
    for combination in combinations:
        if not found.fits(combination):
            continue
        key, cost = found.ports(combination), found.cost(combination)
        if key not in best or best[key][0] > cost:
            best[key] = cost, combination
    allowance.spend("layouts", len(best) * len(group.operations))
    return [GroupChoice(inputs, outputs, found.layouts(combination), cost)
            for (inputs, outputs), (cost, combination) in best.items()]


def _fitting(joints: list[Joint], wanted: Pin, axis: int) -> list[Joint]:
    """Those that read and make what is wanted on an axis."""
    ends = _ends(wanted, axis)
    return [joint for joint in joints if (joint.inputs, joint.outputs) == ends]


def _ends(wanted: Pin, axis: int) -> Ends | None:
    """What is wanted on an axis; None where the labels are none."""
    try:
        inputs, outputs = (tuple(parse_placement((label or "").split(",")[axis]) for label in side) for side in wanted)
    except (ValueError, IndexError):  # what is wrong with them, `Entities.pin` says
        return None
    return inputs, outputs


def _few(joints: list[Joint]) -> list[Joint]:
    """The cheapest, and what splits nothing, without which there might be no assignment."""
    whole = [joint for joint in joints if {*joint.inputs, *joint.outputs} <= {REPLICATE}]
    return [*dict.fromkeys([*joints[:FEW], *whole])] if whole else joints


def _composed(group: Group, graph: PlacementGraph, mesh: PartOfMesh, joints: Sequence[Sequence[Joint]],
              allowance: Allowance) -> list[Combination]:
    """One joint strategy per axis; of more than are priced, the most useful."""
    if prod(map(len, joints)) <= MOST_COMBINED:
        return [*itertools.product(*joints)]
    combined: list[Combination] = [()]
    for k, found in enumerate(joints):
        alone = most_useful([(joint,) for joint in found], group, graph, mesh.part(k, k + 1), MOST_COMBINED, allowance)
        combined = [(*taken, *joint) for taken in combined for joint in alone]
        if k > 0:
            combined = most_useful(combined, group, graph, mesh.part(0, k + 1), MOST_OFFERED, allowance)
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
