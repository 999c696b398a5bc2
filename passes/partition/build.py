"""From a placement graph to the numbers that the ILP solves: groups, what each may choose, entities, edges."""
from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.costs.terms import Prices
from passes.graph.layouts import Layout
from passes.graph.placement_graph import PlacementGraph
from passes.machine.axis import Axes
from passes.partition.axes import axis_rule
from passes.partition.choices import AxisRule, GroupChoice
from passes.partition.edges import Edges
from passes.partition.entities import Entities, Pin, named_apart
from passes.partition.folding import classes_of
from passes.partition.joint import KnownJoints
from passes.partition.lifetimes import THROUGHOUT, Lifetimes
from passes.partition.offers import Offers
from passes.partition.redistribution import bucket_bytes_of
from passes.partition.state import StateModel
from passes.partition.wiring import Wiring
from passes.partition.zero import Zero, weights_of
from passes.solve.allowance import Allowance
from passes.solve.problem import Arc, Problem


@dataclass
class Memo:
    """What problems of one mesh have in common. joints: strategies on single axes, in common with other meshes, too."""

    choices: dict[Hashable, list[GroupChoice]] = field(default_factory=dict)
    arcs: dict[Hashable, tuple[Arc, ...]] = field(default_factory=dict)
    joints: KnownJoints = field(default_factory=KnownJoints)


class PlacementProblem:
    """Builds `problem` on construction; `decode` turns its solution into a decision.

    `rules`: what each axis allows (None: what its name says); `stored`: parameter name -> layout that it has already; `rows`:
    graph inputs handed in split by rows on all axes; `memo`: choices and arcs by what they follow from, to share between
    problems of one mesh; `bucket_bytes`: of gradients that are reduced together (None: as the graph says); `lifetimes`: when
    bytes are counted; `zero`: how parameters may be stored and gathered; `pinned`: the choice that will be pinned, by entity,
    so that it is offered; `like`: a problem whose classes of groups correspond to these, and are pinned alike; `allowance`:
    once it is over, groups that are not in the memo get few choices.
    """

    def __init__(
        self,
        graph: PlacementGraph,
        axes: Axes,
        prices: Prices,
        *,
        rules: Sequence[AxisRule] | None = None,
        state: StateModel | None = None,
        budget_bytes: float | None = None,
        stored: Mapping[str, Layout] | None = None,
        rows: frozenset[str] = frozenset(),
        memo: Memo | None = None,
        fold: bool = True,
        merge: bool = True,
        bucket_bytes: float | None = None,
        lifetimes: Lifetimes = THROUGHOUT,
        zero: Zero | None = None,
        pinned: Mapping[str, Pin] | None = None,
        like: PlacementProblem | None = None,
        allowance: Allowance | None = None,
    ):
        self.graph, self.axes, self.prices, self.state = graph, axes, prices, state or StateModel()
        self.bucket_bytes = bucket_bytes_of(graph) if bucket_bytes is None else bucket_bytes
        memo, zero, allowance = memo or Memo(), zero or Zero(), allowance or Allowance(math.inf)
        rules = [axis_rule(axis, graph) for axis in axes] if rules is None else rules
        offers = Offers(graph, axes, prices, rules, memo.choices, allowance, memo.joints)
        self.groups = offers.groups(merge)
        self.saved = graph.saved | {v.index for v in graph.values if v.producer is None and v.name in rows}
        wiring = Wiring(graph, self.groups)
        self.held_inside = [wiring.held_inside(group, self.saved) for group in self.groups]
        marks = [(held, offers.allowed(group)) for group, held in zip(self.groups, self.held_inside)]
        classes, names = classes_of(self.groups, graph, fold, marks)
        pins = [(pinned or {}).get(name) for name in named_apart(names)]
        self.pins = pins if like is None or len(like.pins) != len(names) else like.pins
        self.lifetimes = lifetimes
        self.entities = Entities(wiring, axes, prices, self.lifetimes, zero)
        self.entities.add_groups(
            names, classes, lambda group, number: offers.choices(group, self.pins[number]), self.held_inside)
        self.entities.add_inputs(self.state, stored or {}, rows)
        bound = weights_of(graph, {
            v.index for v in graph.values if v.kind == "parameter"
            and not zero.gathers_again(v.index in wiring.gradients, v.name in (stored or {}))})
        self.edges = Edges(graph, self.entities, self.saved, rows, prices, self.bucket_bytes, memo.arcs, frozenset(bound),
                           zero.scatters, allowance)
        allowance.spend("entity", len(self.entities.drafts))
        self.entities.name_apart()
        self.problem = Problem(tuple(draft.finished() for draft in self.entities.drafts), self.edges.finished(), budget_bytes,
                               self.lifetimes.positions)

    def pin(self, pinned: Mapping[str, Pin]) -> None:
        """Keep only the choices that a plan names, by entity: labels that it reads and makes."""
        self.entities.pin(pinned)
        self.problem = replace(self.problem, entities=tuple(draft.finished() for draft in self.entities.drafts))
