"""Split a joint graph into forward and backward once its activation checkpointing is decided."""
from __future__ import annotations

from torch.fx import GraphModule

from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision


def drop_unused(half: GraphModule, other: str) -> None:
    """Drop nodes that the partitioner tagged for the other half and that are unused here. It copies nodes without inputs into
    both halves, and dead code elimination keeps random ops: their numbers would be drawn twice."""
    for node in reversed(half.graph.nodes):
        if node.op == "call_function" and not node.users and node.meta.get("partitioner_tag") == other:
            half.graph.erase_node(node)
    half.recompile()


def cut_as_kept(joint: GraphModule, kept: CheckpointDecision, forward_outputs: int, folder: str = "",
                ) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a joint graph that has its storage program. kept: the checkpointing decision. folder: for
    offloaded activations."""
    from passes.presets import rematerializing  # here: graphs from the graph cache are split already

    rematerializing(kept, folder)(joint)
    forward, backward = compat.split_by_tags(joint, forward_outputs)
    drop_unused(forward, "is_backward")
    drop_unused(backward, "is_forward")
    return forward, backward
