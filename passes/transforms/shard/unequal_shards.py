"""Collectives between shards of different sizes: rows of the batch along an axis whose ranks have unequal numbers of them.

A local tensor is seen as (before, own, after) around the split factor. all_gather and reduce_scatter move parts of the size of
the largest, padded with zeros, and cut the padding off; all_to_all takes the sizes as they are. All ranks make the same calls,
so that nodes have the same names on all: by these they agree which values they save for backward.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.local_call import packed_copy, reshape
from passes.transforms.rewriting.call_inserter import CallInserter

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class UnequalParts:
    """The parts of a factor along an axis. before: elements before the factor in memory order of a local tensor, at each
    coordinate; sizes: of the parts; own: this rank's coordinate."""

    before: int
    sizes: tuple[int, ...]
    own: int

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.sizes)][:-1]

    def gathered(self, insert: CallInserter, x: Node, name: str) -> Node:
        """The parts of all ranks, as (before, all, after)."""
        most, n = max(self.sizes), len(self.sizes)
        after = _elements(x) // (self.before * self.sizes[self.own])
        padded = _padded(insert, reshape(insert, x, [self.before, self.sizes[self.own], after]), most)
        moved = _wait(insert, c10d.all_gather_into_tensor.default, packed_copy(insert, padded), n, name)
        parts = [_cut(insert, insert(aten.slice.Tensor, moved, 0, k * self.before, (k + 1) * self.before), 0, size)
                 for k, size in enumerate(self.sizes)]
        return insert(aten.cat.default, parts, 1)

    def split(self, insert: CallInserter, x: Node) -> list[Node]:
        """The parts of a whole factor, each as (before, its size, after)."""
        whole = sum(self.sizes)
        x = reshape(insert, x, [self.before, whole, _elements(x) // (self.before * whole)])
        return [_cut(insert, x, start, size) for start, size in zip(self.starts, self.sizes)]

    def scattered(self, insert: CallInserter, x: Node, name: str) -> Node:
        """The sum over the ranks of this rank's part, as (before, own, after)."""
        most = max(self.sizes)
        parts = insert(aten.cat.default, [_padded(insert, part, most) for part in self.split(insert, x)], 0)
        part = _wait(insert, c10d.reduce_scatter_tensor.default, parts, "sum", len(self.sizes), name)
        return _cut(insert, part, 0, self.sizes[self.own])


def exchanged(insert: CallInserter, x: Node, source: UnequalParts, target: UnequalParts, name: str) -> Node:
    """all_to_all from shards of one factor to shards of another. target: the parts that `x` is split into, with the source
    factor split; source: the parts that are put together, with the target factor split. Returns (before, all, after) around
    the source factor."""
    sent = [reshape(insert, part, [_elements(part)]) for part in target.split(insert, x)]
    each = _elements(x) // (source.sizes[source.own] * sum(target.sizes))  # of one element of both factors
    received = [each * target.sizes[target.own] * size for size in source.sizes]
    moved = _wait(insert, c10d.all_to_all_single.default, insert(aten.cat.default, sent), received,
                  [_elements(part) for part in sent], name)
    parts = []
    for start, size, length in zip([0, *accumulate(received)], source.sizes, received):
        part = insert(aten.slice.Tensor, moved, 0, start, start + length)
        parts.append(reshape(insert, part, [source.before, size, length // (source.before * size)]))
    return insert(aten.cat.default, parts, 1)


def cut_out(insert: CallInserter, x: Node, dim: int, apart: Sequence[int], begin: int, end: int) -> Node:
    """Elements `begin` to `end` of a factor of a dim. apart: (elements of the dim before the factor, its size,
    elements after)."""
    outer, size, inner = apart
    if outer == 1:
        return insert(aten.slice.Tensor, x, dim, begin * inner, end * inner)
    shape = list(x.meta["val"].shape)
    part = reshape(insert, x, [*shape[:dim], outer, size, inner, *shape[dim + 1:]])
    return insert(aten.slice.Tensor, part, dim + 1, begin, end)


def _elements(x: Node) -> int:
    return math.prod(x.meta["val"].shape)


def _padded(insert: CallInserter, x: Node, size: int) -> Node:
    return insert(aten.constant_pad_nd.default, x, [0, 0, 0, size - int(x.meta["val"].shape[1])], 0)


def _cut(insert: CallInserter, x: Node, start: int, size: int) -> Node:
    return insert(aten.slice.Tensor, x, 1, start, start + size)


def _wait(insert: CallInserter, target: Any, *args: Any) -> Node:
    return insert(c10d.wait_tensor.default, insert(target, *args))
