"""Give the outputs of a rank's graph the strides and storage offsets of the traced graph.

Scripts observe them: by `stride()`, `view` and `as_strided`, and by random numbers drawn in memory order.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
from torch.fx import Node

from passes.graph.layouts import overlaps
from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten


def with_traced_strides(node: Node, traced: torch.Tensor, insert: CallInserter) -> Node:
    """A node with the values of `node` and the traced strides; `node` itself if it has them, or another shape."""
    value = node.meta["val"]
    if value.shape != traced.shape or not traced.numel() or _as(value, traced):
        return node
    order = sorted(range(traced.dim()), key=lambda dim: (-traced.stride(dim), dim))
    packed = insert(aten.clone.default, insert(aten.permute.default, node, order), memory_format=torch.contiguous_format)
    result = insert(aten.permute.default, packed, [order.index(dim) for dim in range(traced.dim())])
    return result if _as(result.meta["val"], traced) else _scattered(node, traced, insert)


def _scattered(node: Node, traced: torch.Tensor, insert: CallInserter) -> Node:
    """With gaps, an offset, or overlapping elements: scatter into a buffer of that length, and return a view."""
    shape, stride, offset = list(traced.shape), list(traced.stride()), traced.storage_offset()
    for dim in (dim for dim, step in enumerate(stride) if step == 0 and shape[dim] > 1):
        node, shape[dim] = insert(aten.slice.Tensor, node, dim, 0, 1), 1
    length = offset + sum((size - 1) * step for size, step in zip(shape, stride)) + 1
    memory = insert(aten.full.default, [length], 0, dtype=traced.dtype, device=traced.device)
    if overlaps(shape, stride):
        places = insert(aten.arange.default, length, device=traced.device)
        places = insert(aten.as_strided.default, places, shape, stride, offset)
        filled = insert(aten.index_put.default, memory, [places], node)
    else:
        filled = insert(aten.as_strided_scatter.default, memory, node, shape, stride, offset)
    return insert(aten.as_strided.default, filled, list(traced.shape), stride, offset)


def _as(value: torch.Tensor, traced: torch.Tensor) -> bool:
    return value.stride() == traced.stride() and value.storage_offset() == traced.storage_offset()
