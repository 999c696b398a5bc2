"""Passes that decide placements: by a search, from a saved plan, or from another process's decision.

All of them write DECISION, which the rewrite applies. ANSWER also has its cost and how it was found.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from passes.annotations import Key, read, write
from passes.base import AnalysisPass
from passes.graph.decision import Decision
from passes.graph.layouts import layouts_of_stored
from passes.graph.planning_keys import DECISION, GRAPH_SIGNATURE, OPERATIONS
from passes.hardware.cluster import Cluster
from passes.json_records import FrozenMap
from passes.registry import register
from passes.sharding.formulation.problem_entities import Pin
from passes.sharding.search.mesh_search import SearchConfig, SearchResult, candidate_meshes, search_meshes

SEARCH_RESULT: Key[SearchResult] = Key("search_result", SearchResult, scope="graph")
"""The decision with its mesh and cost, and the meshes that were rejected."""


def _one_cpu() -> SearchConfig:
    return SearchConfig(Cluster.local(1, "cpu"))


@register
@dataclass(frozen=True)
class DecidePlacements(AnalysisPass):
    """Writes DECISION and ANSWER: the cheapest placements on the pinned mesh, or on any that the cluster allows."""

    name = "decide_placements"
    requires = (OPERATIONS, GRAPH_SIGNATURE)
    provides = (DECISION, SEARCH_RESULT)

    conditions: SearchConfig = field(default_factory=_one_cpu)
    mesh: FrozenMap[str, int] | None = None

    def run(self, graph_module: fx.GraphModule) -> None:
        _answer(graph_module, self.conditions, self.mesh, None)


@register
@dataclass(frozen=True)
class ObeyPlacements(AnalysisPass):
    """Writes DECISION and ANSWER: the placements of a plan, saved or written by hand, priced and checked as any others.

    pins: entity -> labels of its inputs and outputs. Entities that a plan does not name are solved for the least cost.
    """

    name = "obey_placements"
    requires = (OPERATIONS, GRAPH_SIGNATURE)
    provides = (DECISION, SEARCH_RESULT)

    conditions: SearchConfig = field(default_factory=_one_cpu)
    mesh: FrozenMap[str, int] | None = None
    pins: FrozenMap[str, Pin] = FrozenMap()

    def run(self, graph_module: fx.GraphModule) -> None:
        _answer(graph_module, self.conditions, self.mesh, self.pins)


@register
@dataclass(frozen=True)
class AdoptPlacements(AnalysisPass):
    """Writes DECISION as made for the same graph elsewhere: by one rank, for all."""

    name = "adopt_placements"
    requires = (OPERATIONS,)
    provides = (DECISION,)

    decision: Decision = Decision((), FrozenMap(), FrozenMap(), FrozenMap(), ())

    def run(self, graph_module: fx.GraphModule) -> None:
        write(DECISION, graph_module, self.decision)


def _answer(graph_module: fx.GraphModule, conditions: SearchConfig, mesh: FrozenMap[str, int] | None,
            pins: FrozenMap[str, Pin] | None) -> None:
    graph = read(OPERATIONS, graph_module).graph
    stored = layouts_of_stored(graph.values, read(GRAPH_SIGNATURE, graph_module).stored)
    answer = search_meshes(graph, stored, conditions, candidate_meshes(conditions.cluster, mesh), pins)
    write(DECISION, graph_module, answer.placed.decision)
    write(SEARCH_RESULT, graph_module, answer)
