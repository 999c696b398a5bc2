"""Slice a rank's rows of a batch before its graph runs, not in it.

In most graphs this slice is the only difference between ranks. Without it ranks have equal graphs, which
share an entry in inductor's cache.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.graph.fx_nodes import BY_COORDINATE
from passes.registry import register

TAKEN = "hpml_taken"
"""Key in the meta of a placeholder: the slices taken of the argument, in order."""

Taken = tuple[tuple[int, int, int], ...]
"""(dim, start, end) of successive views."""


@register
@dataclass(frozen=True)
class HoistBatchSlice(TransformPass):
    """Replaces an input of which a rank reads only one slice by that slice.

    inputs: names of candidates: without a gradient, and not mutated, since both refer to the whole.
    """

    name = "hoist_batch_slice"

    inputs: tuple[str, ...] = ()

    def run(self, graph_module: GraphModule) -> bool:
        changed = False
        for node in graph_module.graph.find_nodes(op="placeholder"):
            while node.name in self.inputs and (slices := _slices(node)) is not None:
                _, dim, start, end = slices[0].args
                node.meta[TAKEN] = (*node.meta.get(TAKEN, ()), (dim, start, end))
                with fake_mode_of(graph_module):
                    whole, part = node.meta["val"], slices[0].meta["val"]
                    node.meta["val"] = torch.empty_strided(part.shape, whole.stride(), dtype=whole.dtype, device=whole.device)
                node.meta.pop("tensor_meta", None)
                for each in slices:
                    each.replace_all_uses_with(node)
                    graph_module.graph.erase_node(each)
                changed = True
        return changed


def _slices(node: Node) -> list[Node] | None:
    """The equal slices that are an input's only readers; None if it has other readers."""
    users, value = list(node.users), node.meta.get("val")
    if not users or not isinstance(value, torch.Tensor):
        return None
    first = users[0]
    if any(user.target is not torch.ops.aten.slice.Tensor or BY_COORDINATE not in user.meta or user.kwargs
           or (user.args, user.meta[BY_COORDINATE]) != (first.args, first.meta[BY_COORDINATE]) for user in users):
        return None
    return users


def batch_slices_of(gm: GraphModule) -> dict[str, Taken]:
    """Slices to take of a graph's arguments before it runs, by placeholder."""
    return {node.name: node.meta[TAKEN] for node in gm.graph.find_nodes(op="placeholder") if TAKEN in node.meta}


def part_of(value: torch.Tensor, taken: Taken) -> torch.Tensor:
    """Apply the slices; returns a view."""
    for dim, start, end in taken:
        value = value.narrow(dim, start, end - start)
    return value
