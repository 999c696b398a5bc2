"""Def-use relations between groups: the producer and the readers of each value, and the gradient of each parameter."""
from __future__ import annotations

from collections.abc import Sequence

from passes.graph.placement_graph import PlacementGraph
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.sharding.grouping.op_groups import OpGroup


class DefUse:
    """readers: value -> groups that read it, each with its input port. gradients: input -> value of its gradient, which takes
    the input's placement."""

    def __init__(self, graph: PlacementGraph, groups: Sequence[OpGroup]):
        self.graph, self.groups = graph, groups
        self._owner = {i: group for group in groups for i in group.operations}
        self.readers: dict[int, list[tuple[OpGroup, int]]] = {v.index: [] for v in graph.values}
        for group in groups:
            for port, v in enumerate(group.inputs):
                self.readers[v].append((group, port))
        self.gradients = {owner: v for v, owner in graph.outputs if owner is not None}

    def maker(self, v: int) -> OpGroup | None:
        """The group that computes a value; None for a graph input."""
        producer = self.graph.values[v].producer
        return None if producer is None else self._owner[producer]

    def held_inside(self, group: OpGroup, saved: frozenset[int]) -> tuple[tuple[int, int], ...]:
        """(position of the operation, port) of the group's saved values that no copy for backward readers accounts for."""
        return tuple(
            (k, port) for k, i in enumerate(group.operations)
            for port, v in enumerate(self.graph.operations[i].outputs)
            if v in saved and (group.phase == BACKWARD or all(reader.phase == FORWARD for reader, _ in self.readers[v]))
        )
