"""Estimate, by the sizes in a Dynamo graph that returns logits and no loss, whether chunks of a loss made of them would pay."""
from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from passes.analyses.inductor_fusion import is_inlined
from passes.compat import size_hint
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.transforms.loss_chunks.chunk_choice import HeadSizes, number_of_chunks
from passes.transforms.loss_chunks.loss_region import Unchunkable

PRODUCTS = frozenset(("linear", "matmul", "mm", "addmm", "__matmul__", "einsum"))
CASTS = frozenset(("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous"))
_MOST_CALLS = 16


def chunks_may_pay(gm: GraphModule, budgeted: bool) -> bool:
    """True if an output is the result of a matrix product, and so large that a loss made of it would be computed in chunks."""
    for node in returned_nodes(gm):
        head = None if node is None else _head_of(node)
        if head is None:
            continue
        value: torch.Tensor = head.meta["example_value"]
        weights = sum(_bytes(x) for x in head.all_input_nodes if x.op == "placeholder")
        rows = _bytes(head) // (size_hint(value.shape[-1], unbacked=0) * value.element_size() or 1)
        try:
            number_of_chunks(HeadSizes(_bytes(head), weights, rows, value.device.type == "cpu"), budgeted,
                             lambda head=head: _held_bytes(gm, head))
        except Unchunkable:
            continue
        return True
    return False


def _head_of(node: Node) -> Node | None:
    """The matrix product that an output with a gradient is made of by casts, views, scales and caps."""
    if not getattr(node.meta.get("example_value"), "requires_grad", False):
        return None
    for _ in range(_MOST_CALLS):
        if node.op not in ("call_function", "call_method") or not isinstance(node.meta.get("example_value"), torch.Tensor):
            return None
        if (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) in PRODUCTS:
            return node
        largest = max(node.all_input_nodes, key=_bytes, default=node)
        if 2 * _bytes(largest) < _bytes(node):
            return None
        node = largest
    return None


def _bytes(node: Node) -> int:
    value, count = node.meta.get("example_value"), 1
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    for size in value.shape:
        count *= size_hint(size, unbacked=0)
    return count * value.element_size()


def _held_bytes(gm: GraphModule, head: Node) -> int:
    """Bytes of the results of the calls before the head, without views, and without what is fused into its readers."""
    sizes: dict[object, int] = {}
    for node in gm.graph.nodes:
        if node is head:
            break
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and node.op != "placeholder" and not _is_fused(node):
            sizes.setdefault(memory_of(value), _bytes(node))
    return sum(sizes.values())


def _is_fused(node: Node) -> bool:
    """True for a call that a compiler computes again in its readers, so that nothing saves its result."""
    name = (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).strip("_")
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return name in CASTS or any(is_inlined(each) for each in overloads)
