"""What every group may choose under the rules of the axes; groups for which that is nothing are taken apart."""
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from passes.costs.terms import Prices
from passes.graph.placement_graph import PlacementGraph
from passes.machine.axis import Axes
from passes.partition.choices import AxisRule, GroupChoice, Pin, allowed, group_choices
from passes.partition.folding import group_signature
from passes.partition.groups import Group, groups_of
from passes.partition.joint import KnownJoints
from passes.rules.base import PARTIAL, PARTIAL_MAX
from passes.solve.allowance import Allowance


class Offers:
    """memo: choices by what they follow from, to share between problems of one mesh. known: joint strategies on single axes."""

    def __init__(self, graph: PlacementGraph, axes: Axes, prices: Prices, rules: Sequence[AxisRule],
                 memo: dict[Hashable, list[GroupChoice]] | None = None, allowance: Allowance | None = None,
                 known: KnownJoints | None = None):
        self.graph, self.axes, self.prices, self.rules = graph, axes, prices, rules
        self._memo, self._allowance = {} if memo is None else memo, allowance or Allowance(math.inf)
        self._known = known or KnownJoints()

    def groups(self, merge: bool) -> list[Group]:
        """A group whose operations a pinned axis splits in ways that do not go together is taken apart: no choice is
        left of it, or none but those that read partial sums, which nothing might make."""

        def stuck(group: Group) -> bool:
            return len(group.operations) > 1 and all(
                any(p in (PARTIAL, PARTIAL_MAX) for layout in choice.inputs for p in layout)
                for choice in self.choices(group)
            )

        groups = groups_of(self.graph, merge)
        apart = {i for group in groups if stuck(group) for i in group.operations}
        return groups_of(self.graph, merge, apart) if apart else groups

    def choices(self, group: Group, wanted: Pin | None = None) -> list[GroupChoice]:
        """wanted: what the group is to read and make; other choices may be left out."""
        key = (group_signature(group, self.graph), self.allowed(group), wanted)
        if key not in self._memo:
            self._memo[key] = group_choices(group, self.graph, self.axes, self.prices, self.rules, wanted,
                                            self._allowance, self._known)
        return self._memo[key]

    def allowed(self, group: Group) -> tuple[bool, ...]:
        """What the axes allow of its operations. Equal groups may differ in that: one reads a weight, the other does not."""
        return tuple(each for rule in self.rules for each in allowed(group, self.graph, rule))
