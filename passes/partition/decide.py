"""Passes that decide where everything is: by a search, by a saved plan, or as another process did.

All of them write DECISION, which the rewrite obeys. ANSWER says besides what it costs and how it was found.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from passes.annotations import Key, read, write
from passes.base import AnalysisPass
from passes.graph.decision import Decision
from passes.graph.keys import DECISION, INTERFACE, OPERATIONS
from passes.graph.layouts import layouts_of_stored
from passes.machine.cluster import Cluster
from passes.partition.entities import Pin
from passes.partition.meshes import Answer, Conditions, candidate_meshes, cheapest
from passes.records import FrozenMap
from passes.registry import register

ANSWER: Key[Answer] = Key("answer", Answer, scope="graph")
"""The decision with its mesh and cost, and the meshes that were rejected."""


def _one_cpu() -> Conditions:
    return Conditions(Cluster.local(1, "cpu"))


@register
@dataclass(frozen=True)
class Decide(AnalysisPass):
    """Writes DECISION and ANSWER: the cheapest placements on the pinned mesh, or on any that the cluster allows."""

    name = "decide"
    requires = (OPERATIONS, INTERFACE)
    provides = (DECISION, ANSWER)

    conditions: Conditions = field(default_factory=_one_cpu)
    mesh: FrozenMap[str, int] | None = None

    def run(self, graph_module: fx.GraphModule) -> None:
        _answer(graph_module, self.conditions, self.mesh, None)


@register
@dataclass(frozen=True)
class Obey(AnalysisPass):
    """Writes DECISION and ANSWER: the placements of a plan, saved or written by hand, priced and checked as any others.

    pins: entity -> labels that it reads and makes. What a plan does not name is decided for the least cost.
    """

    name = "obey"
    requires = (OPERATIONS, INTERFACE)
    provides = (DECISION, ANSWER)

    conditions: Conditions = field(default_factory=_one_cpu)
    mesh: FrozenMap[str, int] | None = None
    pins: FrozenMap[str, Pin] = FrozenMap()

    def run(self, graph_module: fx.GraphModule) -> None:
        _answer(graph_module, self.conditions, self.mesh, self.pins)


@register
@dataclass(frozen=True)
class Adopt(AnalysisPass):
    """Writes DECISION as it was made for the same graph elsewhere: on one rank, for all."""

    name = "adopt"
    requires = (OPERATIONS,)
    provides = (DECISION,)

    decision: Decision = Decision((), FrozenMap(), FrozenMap(), FrozenMap(), ())

    def run(self, graph_module: fx.GraphModule) -> None:
        write(DECISION, graph_module, self.decision)


def _answer(graph_module: fx.GraphModule, conditions: Conditions, mesh: FrozenMap[str, int] | None,
            pins: FrozenMap[str, Pin] | None) -> None:
    graph = read(OPERATIONS, graph_module).graph
    stored = layouts_of_stored(graph.values, read(INTERFACE, graph_module).stored)
    answer = cheapest(graph, stored, conditions, candidate_meshes(conditions.cluster, mesh), pins)
    write(DECISION, graph_module, answer.placed.decision)
    write(ANSWER, graph_module, answer)
