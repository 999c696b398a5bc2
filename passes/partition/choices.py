"""Choices of a group on a whole mesh: one joint strategy per axis, whether they fit, what they cost together.

Axes are composed one after another. Where that makes more combinations than `MOST_COMBINED`, what `passes.partition.prune`
finds to be of no use goes before the next axis comes in. A solver's bound is that of the choices which are offered to it.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from passes.costs.terms import Prices, copy
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.machine.axis import Axes
from passes.partition.combined import Combination, Combined
from passes.partition.groups import Group
from passes.partition.joint import Joint, join
from passes.partition.prune import PartOfMesh, most_useful
from passes.partition.redistribution import after_hop
from passes.rules.base import REPLICATE, Strategy, format_placement

MOST_COMBINED = 1000
"""Combinations of joint strategies that are priced; of more, those are dropped that others can replace."""
MOST_OFFERED = 400
"""Choices of a group where there were more than `MOST_COMBINED` combinations: the cheapest."""


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
    wanted: Pin | None = None,
) -> list[GroupChoice]:
    """Choices on these axes, the cheapest for each boundary, in a fixed order. wanted: labels that the group is to read and
    make; other choices may be left out."""
    cost_per_byte = copy(1e9, prices) / 1e9
    cost_per_flop = prices.kernel(1e12, 0.0, "float32", "matmul") / 1e12
    joints: list[list[Joint]] = []
    for k, axis in enumerate(axes):
        found = join(
            group, graph, axis.size, lambda b, k=k: prices.collective("all_reduce", k, b),
            cost_per_byte, cost_per_flop, rules[k],
        )
        joints.append(_fitting(found, wanted, k) if wanted is not None else found)
    whole = PartOfMesh(axes, prices)
    combinations = _composed(group, graph, whole, joints)
    found = Combined(group, graph, axes, prices)
    best: dict[tuple, tuple[float, Combination]] = {}
    for combination in combinations:
        if not found.fits(combination):
            continue
        key, cost = found.ports(combination), found.cost(combination)
        if key not in best or best[key][0] > cost:
            best[key] = cost, combination
    return [GroupChoice(inputs, outputs, found.layouts(combination), cost)
            for (inputs, outputs), (cost, combination) in best.items()]


def _fitting(joints: list[Joint], wanted: Pin, axis: int) -> list[Joint]:
    """Those that read and make what is wanted on an axis; all of them where there is none."""
    ports = [[(label or "").split(",")[axis:axis + 1] for label in side] for side in wanted]
    return [joint for joint in joints
            if [[[format_placement(p)] for p in side] for side in (joint.inputs, joint.outputs)] == ports] or joints


def _composed(group: Group, graph: PlacementGraph, mesh: PartOfMesh, joints: Sequence[Sequence[Joint]]) -> list[Combination]:
    """One joint strategy per axis; of more than are priced, the most useful."""
    if prod(map(len, joints)) <= MOST_COMBINED:
        return [*itertools.product(*joints)]
    combined: list[Combination] = [()]
    for k, found in enumerate(joints):
        alone = most_useful([(joint,) for joint in found], group, graph, mesh.part(k, k + 1), MOST_COMBINED)
        combined = [(*taken, *joint) for taken in combined for joint in alone]
        if k > 0:
            combined = most_useful(combined, group, graph, mesh.part(0, k + 1), MOST_OFFERED)
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
