"""Start of a rank's shard, read from the process group when the graph runs, instead of a constant in the graph.

Then all ranks have the same calls, and ranks of a node have equal graphs, of which inductor compiles one
(`hpml_compiler.compile.lower.compile_lock`).
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false
from __future__ import annotations

import functools

import torch
from torch.fx import Node

from passes.compat import coordinate_in
from passes.graph.shard_offset import ShardOffset
from passes.op_rules.local_call import Insert

aten, prims = torch.ops.aten, torch.ops.prims

LARGEST_BYTES = 2**16
"""Limit in bytes of a shard that is selected by an index: a copy, unless it is fused, where a slice is a view."""

torch.library.define("hpml::coordinate", "(str group, Device device) -> Tensor")
COORDINATE = torch.ops.hpml.coordinate.default
"""This rank's index in a process group: an integer tensor without dims."""


@torch.library.impl("hpml::coordinate", "default")
def _coordinate(group: str, device: torch.device) -> torch.Tensor:
    return torch.full((), coordinate_in(group), dtype=torch.int64, device=device)


@torch.library.register_fake("hpml::coordinate")
def _fake_coordinate(group: str, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def begin_of(insert: Insert, offset: ShardOffset, device: torch.device) -> Node | int:
    """An integer tensor without dims; a number if all ranks start at 0, or their shards have different sizes."""
    if offset.first is not None:
        return offset.first
    if not offset.strides:
        return 0
    terms = [times(insert, insert(COORDINATE, name, device), offset.count * stride) for name, stride in offset.strides]
    return functools.reduce(lambda a, b: insert(aten.add.Tensor, a, b), terms)


def times(insert: Insert, x: Node, factor: int) -> Node:
    return x if factor == 1 else insert(aten.mul.Tensor, x, factor)


def part_from(insert: Insert, x: Node, dim: int, begin: Node, count: int) -> Node:
    """`count` elements of a dim, from `begin` on."""
    device = x.meta["val"].device
    positions = insert(prims.iota.default, count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False)
    return insert(aten.index.Tensor, x, [*[None] * dim, insert(aten.add.Tensor, positions, begin)])


def is_small(x: Node, parts: int) -> bool:
    """True if one of `parts` equal parts of a value is below the limit."""
    value = x.meta["val"]
    return value.numel() * value.element_size() <= LARGEST_BYTES * parts
