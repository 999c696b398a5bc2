"""Sharded outputs of a graph under its plan, and their gradients."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpml_compiler.runtime.outputs.output_wrapper import ShardedOutput
from hpml_compiler.session import session
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.graph_signature import ShardableOutput
from passes.graph.layouts import Layout, stored_layout
from passes.sharding.graph_boundary import left_sharded


def sharded_outputs_of(annotated: AnalyzedGraph, decision: Decision, over: Callable[[Layout], Layout] = lambda layout: layout,
                       ) -> tuple[ShardedOutput, ...]:
    """Outputs that stay sharded. Call this before the rewrite: afterwards, the graph has local shapes only. over: extends a
    layout to all axes of the mesh."""
    return tuple(sharded_output(annotated, each, over(layout)) for each, layout in left_sharded(annotated, decision))


def sharded_output(annotated: AnalyzedGraph, each: ShardableOutput, layout: Layout) -> ShardedOutput:
    """An output in this layout over all axes of the mesh."""
    name = annotated.interface.outputs[each.number][0]
    whole = next(node.meta["val"] for node in annotated.gm.graph.nodes if node.name == name)
    value = annotated.graph.values[annotated.graph.outputs[each.number][0]]
    with torch.no_grad():
        like = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
    return ShardedOutput(each.position, session.to_dtensor(stored_layout(value, layout)), like, name)


@dataclass(frozen=True)
class ShardedTangent:
    """A gradient that arrives sharded. number: its place among backward's tangents. part: fake of this rank's shard. owner: the
    only rank of a pipeline that has it; None: every one."""

    number: int
    name: str
    part: torch.Tensor
    owner: int | None = None


def sharded_tangents_of(annotated: AnalyzedGraph, decision: Decision) -> tuple[ShardedTangent, ...]:
    """Gradients of the sharded outputs. Call this after the rewrite, when the graph has local shapes."""
    tangents = [node for node in annotated.gm.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    names = {each.tangent for each, _ in left_sharded(annotated, decision)}
    return tuple(ShardedTangent(k, str(node.name), node.meta["val"]) for k, node in enumerate(tangents) if node.name in names)
