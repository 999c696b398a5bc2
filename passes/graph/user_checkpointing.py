"""A script's own activation checkpointing (`torch.utils.checkpoint`), read from the marks on a graph's nodes.

While a checkpointed region is traced, torch marks each of its calls with a policy (by default: recompute) and with the number
of the region. torch's partitioner obeys these marks, and so does hpml's checkpointing search; every transform copies them from
a call to the calls that replace it.
"""
from __future__ import annotations

from typing import Literal

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

POLICY, REGION, HOOKED = "recompute", "ac_graph_id", "has_backward_hook"
CHECKPOINTED = (POLICY, REGION, HOOKED)
"""Keys of the marks in a node's `meta`."""

UserPolicy = Literal["", "keep", "again"]
"""No policy; the result must be saved; the result must be recomputed."""


def user_policy_of(node: Node) -> UserPolicy:
    """The script's policy for a call's result, read as torch's partitioner does: "prefer recompute" means recompute,
    and values that one region passes to a later one are saved."""
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
    """Mark one node like another; remove the marks if that one has none."""
    for key in CHECKPOINTED:
        target.meta.pop(key, None)
        if source is not None and key in source.meta:
            target.meta[key] = source.meta[key]
