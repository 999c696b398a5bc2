"""Outputs of a pipeline: each stays on the rank that makes it, in the placement of its stage, until something reads it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpml_compiler.compile.inputs.pp_mesh import PipelineMesh
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.compile.wrapper.sharded_outputs import ShardedTangent, sharded_output
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS
from hpml_compiler.runtime.outputs.output_wrapper import ShardedOutput
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank, no_rows
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.graph_signature import ShardableOutput


@dataclass(frozen=True)
class StageOutput:
    """An output of the whole graph in the placement of its stage, replicated along `pp`."""

    described: ShardableOutput
    placed: ShardedOutput

    def at(self, owner: int | None, mesh: PipelineMesh) -> ShardedOutput:
        """The same on one rank along `pp`."""
        if owner is None:
            return self.placed
        return replace(self.placed, placements=tuple(SingleRank(owner) if axis == PP_AXIS else placement for axis, placement in
                                                     zip(mesh.sizes, self.placed.placements, strict=True)))


def outputs_of_stages(annotated: AnalyzedGraph, placements: Decision | None, mesh: PipelineMesh) -> tuple[StageOutput, ...]:
    """Outputs that need not be read, before the graph is rewritten. placements: inside a stage."""
    return tuple(StageOutput(each, sharded_output(annotated, each, mesh.over_all(
        () if placements is None else placements.outputs[each.number].target))) for each in annotated.interface.unread)


def outputs_in_stages(takes: RuntimeMetadata, found: tuple[StageOutput, ...], owners: Mapping[int, int],
                      annotated: AnalyzedGraph, mesh: PipelineMesh) -> RuntimeMetadata:
    """The metadata with the outputs that stay where they are made, and their gradients. found: before the rewrite; annotated:
    after it. owners: number of an output -> the only rank along `pp` that has it."""
    place = mesh.place()
    tangents = [node for node in annotated.gm.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    numbers = {node.name: k for k, node in enumerate(tangents)}
    outputs, arriving = [], []
    for each in found:
        owner, tangent = owners.get(each.described.number), each.described.tangent
        placed = each.at(owner, mesh)
        if all(placement.is_replicate() for placement in placed.placements):
            continue
        outputs.append(placed)
        if tangent is not None:
            part = tangents[numbers[tangent]].meta["val"]
            part = part if owner in (None, place) else part.new_empty(no_rows(part.shape))
            arriving.append(ShardedTangent(numbers[tangent], tangent, part, owner))
    return replace(takes, sharded_outputs=tuple(outputs), tangents=tuple(arriving))
