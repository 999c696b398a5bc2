"""Between groups: which one makes a value, which ones read it, and which one's gradient a parameter takes."""
from __future__ import annotations

from collections.abc import Sequence

from passes.graph.phase import BACKWARD, FORWARD
from passes.graph.placement_graph import PlacementGraph
from passes.partition.groups import Group


class Wiring:
    """readers: value -> groups that read it, each with its in-port. gradients: parameter -> the value that is its gradient."""

    def __init__(self, graph: PlacementGraph, groups: Sequence[Group]):
        self.graph, self.groups = graph, groups
        self._owner = {i: group for group in groups for i in group.operations}
        self.readers: dict[int, list[tuple[Group, int]]] = {v.index: [] for v in graph.values}
        for group in groups:
            for port, v in enumerate(group.inputs):
                self.readers[v].append((group, port))
        self.gradients = {parameter: v for v, parameter in graph.outputs if parameter is not None}

    def maker(self, v: int) -> Group | None:
        """None for a graph input."""
        producer = self.graph.values[v].producer
        return None if producer is None else self._owner[producer]

    def held_inside(self, group: Group, saved: frozenset[int]) -> tuple[tuple[int, int], ...]:
        """(position of the operation, port) of the group's saved values whose bytes no copy for backward readers carries."""
        return tuple(
            (k, port) for k, i in enumerate(group.operations)
            for port, v in enumerate(self.graph.operations[i].outputs)
            if v in saved and (group.phase == BACKWARD or all(reader.phase == FORWARD for reader, _ in self.readers[v]))
        )
