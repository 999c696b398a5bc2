"""Build the ILP's numbers from a placement graph: groups, their choices, entities, edges."""
from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.cost_model.cost_terms import Prices
from passes.graph.layouts import Layout
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.axis import Axes
from passes.sharding.formulation.problem_edges import ProblemEdges
from passes.sharding.formulation.problem_entities import Pin, ProblemEntities, numbered_names
from passes.sharding.grouping.def_use import DefUse
from passes.sharding.grouping.group_symmetry import classes_of
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.sharding.pricing.redistribution import bucket_bytes_of
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.strategies.axis_pins import axis_rule
from passes.sharding.strategies.axis_strategies import AxisStrategies
from passes.sharding.strategies.group_strategies import GroupStrategyCache
from passes.sharding.strategies.mesh_strategies import AxisRule, MeshStrategy
from passes.sharding.strategies.zero_levels import ZeroRules
from passes.solver.problem import Arc, Problem
from passes.solver.work_limit import WorkLimit


@dataclass
class MeshTables:
    """Tables shared by problems of one mesh. joints: single-axis strategies, also shared with other meshes."""

    choices: dict[Hashable, list[MeshStrategy]] = field(default_factory=dict)
    arcs: dict[Hashable, tuple[Arc, ...]] = field(default_factory=dict)
    joints: GroupStrategyCache = field(default_factory=GroupStrategyCache)


class PlacementProblem:
    """Builds `problem` on construction; `decode` turns its solution into a decision.

    `rules`: the strategies allowed on each axis (None: derived from the axis name); `stored`: input -> its layout,
    where fixed; `rows`: graph inputs sharded by rows on all axes; `memo`: choices and arcs by signature, shared between
    problems of one mesh; `bucket_bytes`: size of a gradient bucket (None: the graph's); `lifetimes`: the points at which bytes
    are counted; `zero`: how parameters may be stored and gathered; `pinned`: entity -> the choice that will be pinned, so that
    it is generated; `like`: a problem with corresponding classes of groups, whose pins apply here; `allowance`: once it is
    spent, groups that are not in the memo get few choices.
    """

    def __init__(
        self,
        graph: PlacementGraph,
        axes: Axes,
        prices: Prices,
        *,
        rules: Sequence[AxisRule] | None = None,
        state: TrainingStateModel | None = None,
        budget_bytes: float | None = None,
        stored: Mapping[str, Layout] | None = None,
        rows: frozenset[str] = frozenset(),
        memo: MeshTables | None = None,
        fold: bool = True,
        merge: bool = True,
        bucket_bytes: float | None = None,
        lifetimes: MemoryModel = STEP_PEAK,
        zero: ZeroRules | None = None,
        pinned: Mapping[str, Pin] | None = None,
        like: PlacementProblem | None = None,
        allowance: WorkLimit | None = None,
    ):
        self.graph, self.axes, self.prices, self.state = graph, axes, prices, state or TrainingStateModel()
        self.bucket_bytes = bucket_bytes_of(graph) if bucket_bytes is None else bucket_bytes
        memo, zero, allowance = memo or MeshTables(), zero or ZeroRules(), allowance or WorkLimit(math.inf)
        rules = [axis_rule(axis, graph) for axis in axes] if rules is None else rules
        offers = AxisStrategies(graph, axes, prices, rules, memo.choices, allowance, memo.joints)
        self.groups = offers.groups(merge)
        sharded = rows | {v.name for v in graph.values if v.kind != "parameter" and v.name in (stored or {})}
        self.saved = graph.saved | {v.index for v in graph.values if v.producer is None and v.name in sharded}
        wiring = DefUse(graph, self.groups)
        self.held_inside = [wiring.held_inside(group, self.saved) for group in self.groups]
        marks = [(held, offers.allowed(group)) for group, held in zip(self.groups, self.held_inside)]
        classes, names = classes_of(self.groups, graph, fold, marks, memo.joints.numbers)
        pins = [(pinned or {}).get(name) for name in numbered_names(names)]
        self.pins = pins if like is None or len(like.pins) != len(names) else like.pins
        self.lifetimes = lifetimes
        self.entities = ProblemEntities(wiring, axes, prices, self.lifetimes, zero)
        self.entities.add_groups(
            names, classes, lambda group, number: offers.choices(group, self.pins[number]), self.held_inside)
        self.entities.add_inputs(self.state, stored or {}, rows)
        bound = graph.seen_as(
            v.index for v in graph.values if v.kind == "parameter"
            and not zero.gathers_again(v.index in wiring.gradients, v.name in (stored or {})))
        self.edges = ProblemEdges(graph, self.entities, self.saved, sharded, prices, self.bucket_bytes, memo.arcs,
                                  frozenset(bound),
                                  zero.scatters, allowance)
        allowance.spend("entity", len(self.entities.drafts))
        self.entities.name_apart()
        self.problem = Problem(tuple(draft.finished() for draft in self.entities.drafts), self.edges.finished(), budget_bytes,
                               self.lifetimes.positions)

    def pin(self, pinned: Mapping[str, Pin]) -> None:
        """Keep only the choices that a plan names, by entity: labels of its inputs and outputs."""
        self.entities.pin(pinned)
        self.problem = replace(self.problem, entities=tuple(draft.finished() for draft in self.entities.drafts))
