"""Runtime metadata: the data that a runtime wrapper needs besides compiled code, whichever way the graph was compiled."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from hpml_compiler.compile.wrapper.sharded_outputs import ShardedTangent
from hpml_compiler.planner.graph import memory_budget
from hpml_compiler.planner.step_decision import StepDecision
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.runtime.outputs.output_wrapper import ShardedOutput
from hpml_compiler.runtime.placements.unsharded_params import GatheredInput
from hpml_compiler.session import session
from passes import compat
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision, Route
from passes.graph.layouts import Layout, stored_layout
from passes.transforms.shard.hoist_batch_slice import Taken


@dataclass(frozen=True)
class SessionEntry:
    """The session's record of a graph that is planned at once. unruled: calls that are replicated since no rule splits them.
    structure: structural hash by which later graphs find its decisions (`planner.graph.same_structure`), on rank 0."""

    record: GraphPlan
    rejected: tuple[MeshAttempt, ...]
    unruled: Mapping[str, tuple[str, ...]]
    structure: str


@dataclass(frozen=True)
class RuntimeMetadata:
    """Plain data, which the graph cache stores. On one rank, only `written` and `budgeted` are set.

    uses_rng: whether the graph draws random numbers. placements: of the parameters that it places, by position. unsharded:
    parameters that it takes unsharded, by placeholder. gathered, written: positions of arguments that each call gathers, and of
    those that it mutates. sharded_outputs, tangents: results that stay sharded, and their gradients. slices: those of arguments
    taken before the graph runs, by position. owned: parameters that only one rank has, by placeholder; None without stages.
    own_here: positions of those that are on the right rank, or move to it. moved: new placements of parameters that were placed
    otherwise, by position.
    decision: about its step. budgeted: under a budget, its memory as later graphs of the step see it. graph_hash: of a graph
    that was planned at once. entry: None where the plan is made on demand.
    """

    training: bool = False
    uses_rng: bool = False
    placements: Mapping[int, tuple[Placement, ...]] = field(default_factory=dict)
    unsharded: Mapping[str, GatheredInput] = field(default_factory=dict)
    gathered: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    sharded_outputs: tuple[ShardedOutput, ...] = ()
    tangents: tuple[ShardedTangent, ...] = ()
    slices: Mapping[int, Taken] = field(default_factory=dict)
    owned: Mapping[str, int] | None = None
    own_here: frozenset[int] = frozenset()
    moved: Mapping[int, tuple[Placement, ...]] = field(default_factory=dict)
    decision: StepDecision = StepDecision()
    budgeted: memory_budget.GraphMemory | None = None
    graph_hash: str = ""
    entry: SessionEntry | None = None

    def of_plan(self, annotated: AnalyzedGraph, planned: PlanResult, structure: str) -> RuntimeMetadata:
        """The metadata with the decisions of a plan that was made at once. structure: see `SessionEntry`."""
        record, decision = planned.record, planned.decision
        entry = SessionEntry(record, planned.rejected, dict(annotated.graph.unruled), structure)
        return replace(self, training=annotated.interface.training, placements=placements_of(annotated, decision),
                       unsharded=unsharded_inputs(annotated, decision), graph_hash=record.graph_hash, entry=entry)

    def without_fakes(self) -> RuntimeMetadata:
        """The metadata with meta tensors in place of fakes, which belong to a trace."""
        with compat.outside_tracing():
            return replace(self, sharded_outputs=tuple(replace(each, like=_meta(each.like)) for each in self.sharded_outputs),
                           tangents=tuple(replace(each, part=_meta(each.part)) for each in self.tangents))

    def agreed(self) -> list[Any]:
        """The part that is the same on all ranks of one plan."""
        record = self.entry and self.entry.record.model_dump_json(exclude={"seconds", "frame", "blocks"})
        stages, kept = self.decision.stages, self.decision.checkpointing
        return [record, self.training, self.placements, self.owned, str(self.decision),
                stages and (stages.blocks, stages.time_us), kept and sorted(kept.names)]


def unsharded_inputs(annotated: AnalyzedGraph, decision: Decision, over: Callable[[Route], Route] = lambda route: route,
            ) -> dict[str, GatheredInput]:
    """Parameters that a graph takes unsharded, by placeholder. over: extends a route to all axes of the mesh."""
    positions, values = annotated.interface.positions, annotated.graph.values
    named = {values[v].name: route for v, route in decision.held.items()}
    return {name: GatheredInput.along(over(route), positions[name]) for name, route in named.items()}


def placements_of(annotated: AnalyzedGraph, decision: Decision, over: Callable[[Layout], Layout] = lambda layout: layout,
                  ) -> dict[int, tuple[Placement, ...]]:
    """Placements of every parameter that gets placed now, by position. over: extends a layout to all axes of the mesh."""
    values, interface = annotated.graph.values, annotated.interface
    if not interface.training:
        return {}
    return {interface.positions[values[v].name]: session.to_dtensor(stored_layout(values[v], over(decision.stored(v))))
            for v in decision.inputs if values[v].kind == "parameter" and values[v].name not in interface.stored}


def _meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
