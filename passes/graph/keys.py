"""Annotations that planning leaves on a graph module, and the handle that large results travel in."""
from __future__ import annotations

from typing import Generic, TypeVar

from passes.annotations import Key
from passes.graph.decision import Decision
from passes.graph.interface import Interface
from passes.graph.placement_graph import PlacementGraph
from passes.rules.base import Rule

T = TypeVar("T")


class Handle(Generic[T]):
    """A result too large to freeze, equal only to itself. Read it; who changes a graph drops it and writes another."""

    __slots__ = ("value",)

    def __init__(self, value: T):
        self.value = value


class Operations:
    """The planner's view of a graph with the rule of every operation."""

    __slots__ = ("graph", "rules")

    def __init__(self, graph: PlacementGraph, rules: list[Rule | None]):
        self.graph, self.rules = graph, rules


INTERFACE: Key[Handle[Interface]] = Key("interface", Handle, scope="graph")
"""Roles of inputs and outputs."""
OPERATIONS: Key[Operations] = Key("operations", Operations, scope="graph")
"""Operations with strategies, values with factors."""
DECISION: Key[Handle[Decision]] = Key("decision", Handle, scope="graph")
"""Layouts of every operation and the way of every value."""
