"""Give each gradient that goes into `.grad` its own memory.

Autograd takes a graph's output for a leaf as `.grad` without a copy if nobody else references that tensor. It does not see that
another tensor shares the memory: a tangent that is returned unchanged, or the gradient of another parameter. A script that then
scales or clips one gradient in place would change the other.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.graph.fx_nodes import memory_of
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten
GOOD_PART = 0.9


@register
@dataclass(frozen=True)
class UnaliasGradients(TransformPass):
    """Copies a gradient that aliases an input, a forward output or another gradient. Disjoint parts of one tensor,
    such as of a bucket, stay as they are. outputs: indices among the graph's outputs of the gradients that
    go into `.grad`; forward_outputs: number of outputs before all gradients. compact: also copies a gradient that is part of
    a mostly unused storage, such as a rank's part of an all-reduced gradient: the whole storage would stay in memory."""

    name = "unalias_gradients"

    outputs: tuple[int, ...] = ()
    forward_outputs: int = 0
    compact: bool = False

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        output = graph.output_node()
        returned = list(output.args[0])
        taken = {memory_of(node) for node in (*graph.find_nodes(op="placeholder"), *returned[:self.forward_outputs])} - {None}
        kept = set(self.outputs)
        parts: dict[int, list[tuple[int, int]]] = {}
        wasteful = _wasteful(returned) if self.compact else set()
        changed = False
        # First gradients that are returned unchanged: they need no memory of their own, but others must not alias them.
        for k in sorted(range(self.forward_outputs, len(returned)), key=lambda k: k in kept):
            node = returned[k]
            memory = memory_of(node)
            if memory is None:
                continue
            start, end = _bytes(node)
            if k in kept and (memory in taken or memory in wasteful
                              or any(start < e and s < end for s, e in parts.get(memory, ()))):
                # Copy early where that frees the rest; not where a phase is defined by its position before the forward outputs.
                place = node.next if memory in wasteful and node.op == "call_function" else output
                insert = CallInserter(graph, place, like=node, fake_mode=fake_mode_of(graph_module))
                returned[k] = insert(aten.clone.default, node)
                returned[k].meta["partitioner_tag"] = "is_backward"
                changed = True
            else:
                parts.setdefault(memory, []).append((start, end))
        if changed:
            output.args = (tuple(returned) if isinstance(output.args[0], tuple) else returned,)
        return changed


def _wasteful(returned: Sequence[object]) -> set[int]:
    """Storages of which the outputs use only a small part."""
    needed: dict[int, int] = defaultdict(int)
    sizes: dict[int, int] = {}
    for node in returned:
        if (memory := memory_of(node)) is not None:
            start, end = _bytes(node)
            needed[memory] += end - start
            sizes[memory] = node.meta["val"].untyped_storage().nbytes()
    return {memory for memory, nbytes in needed.items() if nbytes < GOOD_PART * sizes[memory]}


def _bytes(node: Node) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    value = node.meta["val"]
    if not value.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = value.storage_offset()
    return start * value.element_size(), (start + last + 1) * value.element_size()
