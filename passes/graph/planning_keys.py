"""Annotations that planning leaves on a graph module."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from passes.annotations import Key
from passes.graph.decision import Decision
from passes.graph.graph_signature import GraphSignature
from passes.graph.placement_graph import PlacementGraph
from passes.op_rules.base import Rule


@dataclass(frozen=True, repr=False)
class Operations:
    """The planner's view of a graph with the rule of every operation."""

    graph: PlacementGraph
    rules: tuple[Rule | None, ...]
    frozen_by_contract: ClassVar[bool] = True
    """Only read once it is built; see `passes.frozen`."""

    def __repr__(self) -> str:
        return repr(self.graph)


GRAPH_SIGNATURE: Key[GraphSignature] = Key("graph_signature", GraphSignature, scope="graph")
"""Roles of inputs and outputs."""
OPERATIONS: Key[Operations] = Key("operations", Operations, scope="graph")
"""Operations with strategies, values with factors."""
DECISION: Key[Decision] = Key("decision", Decision, scope="graph")
"""Layouts of every operation and the routes of every value."""
