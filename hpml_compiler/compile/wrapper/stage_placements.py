"""Placements of parameters in a pipeline: on the axes of their stage, and on one rank along `pp` where only that one needs
them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from hpml_compiler.compile.inputs.moved_parameters import StageMoves
from hpml_compiler.compile.inputs.pp_mesh import PipelineMesh
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata, placements_of, unsharded_inputs
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank, at_other_owner, owner_of
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_signature import GraphInput
from passes.session_state import state_of


def placed_in_stages(takes: RuntimeMetadata, annotated: AnalyzedGraph, planned: PlanResult, mesh: PipelineMesh,
                     ) -> RuntimeMetadata:
    """The metadata with the placements of a graph that was planned on the ranks of one stage."""
    held = unsharded_inputs(annotated, planned.decision, mesh.route_over_all)
    takes = replace(takes, unsharded=held, graph_hash=planned.record.graph_hash)
    if not annotated.interface.training:
        return takes
    return replace(takes, placements=placements_of(annotated, planned.decision, mesh.over_all))


def owned_parameters(takes: RuntimeMetadata, found: Mapping[str, int], positions: Mapping[str, int], given: Sequence[Any],
                     described: Sequence[GraphInput], mesh: PipelineMesh, training: bool) -> RuntimeMetadata:
    """The metadata with the parameters that only one rank has. found: the rank that alone needs a parameter, by placeholder. A
    parameter placed on another rank before is lent by that rank, or moves where a pipeline is cut anew."""
    owned, own_here, placed, moved = {}, set(takes.own_here), dict(takes.placements), dict(takes.moved)
    may_move = training and state_of(StageMoves).allowed
    for name, position in positions.items():
        parameter, owner = given[position], found.get(name)
        if isinstance(parameter, DTensor):
            before = owner_of(parameter)
            if owner is not None and before is not None and (before == owner or may_move):
                owned[name] = owner
                own_here.add(position)
                if before != owner:
                    moved[position] = at_other_owner(parameter.placements, owner)
        elif training and described[position].placeable:
            placements = placed.get(position, (Replicate(),) * len(mesh.sizes))
            if owner is not None and parameter.dim():
                owned[name] = owner
                placements = tuple(SingleRank(owner) if axis == PP_AXIS else placement
                                   for axis, placement in zip(mesh.sizes, placements, strict=True))
            placed[position] = placements
    return replace(takes, owned=owned, own_here=frozenset(own_here), placements=placed, moved=moved)
