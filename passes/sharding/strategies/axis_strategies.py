"""Choices of every group under the rules of the axes; groups without any choice are split into single operations."""
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from passes.cost_model.cost_terms import Prices
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.axis import Axes
from passes.op_rules.base import PARTIAL, PARTIAL_MAX
from passes.sharding.grouping.op_groups import OpGroup, groups_of
from passes.sharding.strategies.group_strategies import GroupStrategyCache
from passes.sharding.strategies.mesh_strategies import AxisRule, MeshStrategy, Pin, allowed, strategies_on_mesh
from passes.solver.work_limit import WorkLimit


class AxisStrategies:
    """memo: choices by signature, shared between problems of one mesh. known: joint strategies on single axes."""

    def __init__(self, graph: PlacementGraph, axes: Axes, prices: Prices, rules: Sequence[AxisRule],
                 memo: dict[Hashable, list[MeshStrategy]] | None = None, allowance: WorkLimit | None = None,
                 known: GroupStrategyCache | None = None):
        self.graph, self.axes, self.prices, self.rules = graph, axes, prices, rules
        self._memo, self._allowance = {} if memo is None else memo, allowance or WorkLimit(math.inf)
        self._known = known or GroupStrategyCache()

    def groups(self, merge: bool) -> list[OpGroup]:
        """The groups. A group whose operations a pinned axis splits in incompatible ways is split into single operations: it
        has no choice left, or only choices that read partial sums, which no producer might offer."""

        def stuck(group: OpGroup) -> bool:
            return len(group.operations) > 1 and all(
                any(p in (PARTIAL, PARTIAL_MAX) for layout in choice.inputs for p in layout)
                for choice in self.choices(group)
            )

        groups = groups_of(self.graph, merge)
        apart = {i for group in groups if stuck(group) for i in group.operations}
        return groups_of(self.graph, merge, apart) if apart else groups

    def choices(self, group: OpGroup, wanted: Pin | None = None) -> list[MeshStrategy]:
        """Choices of a group. wanted: labels of inputs and outputs that must be included; other choices may be left out."""
        key = (self._known.numbers.of(group, self.graph), self.allowed(group), wanted)
        if key not in self._memo:
            self._memo[key] = strategies_on_mesh(group, self.graph, self.axes, self.prices, self.rules, wanted,
                                                 self._allowance, self._known)
        return self._memo[key]

    def allowed(self, group: OpGroup) -> tuple[bool, ...]:
        """Strategies that the axes allow. Equal groups may differ in that: one reads a weight, the other does not."""
        return tuple(each for rule in self.rules for each in allowed(group, self.graph, rule))
