"""Forward and backward of a joint graph of which it was decided what is saved."""
from __future__ import annotations

from torch.fx import GraphModule

from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.presets import rematerializing


def drop_unused(half: GraphModule, other: str) -> None:
    """Take out what belongs to the other half, by its tag, and is not read here. The partitioner copies what needs no inputs
    into both halves, and elimination of dead code leaves random numbers: they would be drawn twice."""
    for node in reversed(half.graph.nodes):
        if node.op == "call_function" and not node.users and node.meta.get("partitioner_tag") == other:
            half.graph.erase_node(node)
    half.recompile()


def cut_as_kept(joint: GraphModule, kept: CheckpointDecision, forward_outputs: int, folder: str = "",
                ) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a joint graph, with its tape, of which it was decided what is saved. folder: for what is
    offloaded."""
    rematerializing(kept, folder)(joint)
    forward, backward = compat.split_by_tags(joint, forward_outputs)
    drop_unused(forward, "is_backward")
    drop_unused(backward, "is_forward")
    return forward, backward
