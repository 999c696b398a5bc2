"""What a script says by activation checkpointing (`torch.utils.checkpoint`) of what is kept for backward.

While a checkpointed region is traced, torch marks each of its calls: with a policy, which is to compute once more if nothing
else was said, and with the number of the region. torch's partitioner obeys these marks, and so does whatever decides here;
every transform hands them on from a call to the calls that it becomes.
"""
from __future__ import annotations

from typing import Literal

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

POLICY, REGION, HOOKED = "recompute", "ac_graph_id", "has_backward_hook"
CHECKPOINTED = (POLICY, REGION, HOOKED)
"""Where the marks are, in the `meta` of a node."""

UserPolicy = Literal["", "keep", "again"]
"""Nothing; that a result is kept; that it is not, but computed once more."""


def user_policy_of(node: Node) -> UserPolicy:
    """What a script said of a call's result, read as torch's partitioner does: to prefer to compute it once more is to do so,
    and what one region hands to a later one is kept."""
    policy = node.meta.get(POLICY)
    if policy is CheckpointPolicy.MUST_SAVE:
        return "keep"
    if not _again(node):
        return ""
    readers = [user for user in node.users if _again(user)]
    if REGION in node.meta and any(user.meta.get(REGION, -1) > node.meta[REGION] for user in readers):
        return "keep"
    return "keep" if node.meta.get(HOOKED) and not readers else "again"


def _again(node: Node) -> bool:
    return node.meta.get(POLICY) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def copy_checkpoint_marks(source: Node | None, target: Node) -> None:
    """Mark one node as another is, or not at all if that is not."""
    for key in CHECKPOINTED:
        target.meta.pop(key, None)
        if source is not None and key in source.meta:
            target.meta[key] = source.meta[key]
