"""Common-subexpression elimination that respects calls held back for backward.

A forward value that backward needs is redistributed again in backward, so that the shard is saved and not the
whole. A common-subexpression elimination that ignores this, such as the partitioner's own, would merge the two
redistributions: forward's result would be saved, and a sharded parameter would stay unsharded in memory until backward. So the
partitioner's is switched off (`compat.min_cut_partition`), and this pass replaces it.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from passes.base import TransformPass
from passes.compat import pytree
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE, BY_COORDINATE, WAIT, is_collective, memory_of
from passes.op_rules.rule_table import is_random
from passes.registry import register

aten = torch.ops.aten
UNDEFINED = (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default)


@register
@dataclass(frozen=True)
class Deduplicate(TransformPass):
    """Replace equal calls with equal arguments by the first of them. Excluded: random and mutating calls, aliases of
    an output (each result belongs to the caller), calls held back for backward whose equal is not, and calls that are equal
    on some ranks only: all ranks keep the same calls."""

    name = "deduplicate"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        returned = _returned_memory(graph)
        first: dict[Hashable, Node] = {}
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function" or not _repeatable(node) or memory_of(node) in returned:
                continue
            leaves, form = pytree.tree_flatten((node.args, dict(node.kwargs)))
            held_back = node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE
            # 1, 1.0 and True are equal, but not as arguments; nor are 0.0 and -0.0.
            key = (node.target, tuple((type(x), repr(x) if isinstance(x, float) else x) for x in leaves), str(form), held_back,
                   node.meta.get(BY_COORDINATE))
            if first.setdefault(key, node) is not node:
                node.replace_all_uses_with(first[key])
                graph.erase_node(node)
                changed = True
        return changed


def _returned_memory(graph: Graph) -> set[int | None]:
    """Storages of the outputs; for a collective, of its wait."""
    returned = {memory_of(node) for node in graph.output_node().all_input_nodes} - {None}
    for node in graph.find_nodes(op="call_function", target=WAIT):
        if memory_of(node) in returned:
            returned.add(memory_of(node.args[0]))
    return returned


def _repeatable(node: Node) -> bool:
    """True if a second call returns the same and has no other effect."""
    if is_collective(node.target):
        return True  # the same on all ranks, whose graphs have the same calls in the same order
    return not (node.is_impure() or is_random(node.target) or node.target in UNDEFINED)
