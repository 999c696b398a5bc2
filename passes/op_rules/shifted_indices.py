"""Local calls of operators that index a split dim: each rank reads or writes the indices in its own range.

Indices are shifted by the start of the range. Indices outside are read at 0 and masked, or written to a spare slot.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.fx import Node

from passes.op_rules.local_call import Insert, LocalCall, LocalRange

aten = torch.ops.aten


def if_split(local: Callable[[LocalCall, Insert], Node]) -> Callable[[LocalCall, Insert], Node]:
    """The local call where the indexed dim is split; elsewhere indices stay as they are."""
    @functools.wraps(local)
    def chosen(call: LocalCall, insert: Insert) -> Node:
        return local(call, insert) if call.ranges else call.unchanged(insert)

    return chosen


def range_of(call: LocalCall) -> LocalRange:
    (own,) = call.ranges.values()
    return own


def whole_size(call: LocalCall) -> int:
    """Size of the indexed dim."""
    assert call.rule is not None
    (letter,) = call.rule.indexed
    return call.rule.sizes[letter]


def from_start(call: LocalCall, insert: Insert, index: Node) -> Node:
    """Index counted from the start of this rank's range: negative, or at least its size, where it lies outside."""
    own = range_of(call)
    if call.at_run_time:
        return insert(aten.sub.Tensor, index, own.asked(insert, index.meta["val"].device))
    return own.marked(insert(aten.sub.Tensor, index, own.first))


def shifted(call: LocalCall, insert: Insert, index: Node, wraps: bool = False) -> tuple[Node, Node]:
    """(index shifted into this rank's range, or 0; whether it lies there). `wraps`: negative ones count from the end."""
    own = range_of(call)
    if wraps:
        end = insert(aten.add.Tensor, index, whole_size(call))
        index = insert(aten.where.self, insert(aten.lt.Scalar, index, 0), end, index)
    moved = from_start(call, insert, index)
    valid = insert(aten.bitwise_and.Tensor, insert(aten.ge.Scalar, moved, 0), insert(aten.lt.Scalar, moved, own.count))
    return insert(aten.mul.Tensor, moved, valid), valid


def before(insert: Insert, x: Node, trailing: int) -> Node:
    """A mask over indices, broadcast to values with `trailing` more dims."""
    for _ in range(trailing):
        x = insert(aten.unsqueeze.default, x, -1)
    return x


def masked(insert: Insert, x: Node, valid: Node) -> Node:
    zero = insert(aten.full.default, [], 0, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
    return insert(aten.where.self, valid, x, zero)


def place_of(indices: list) -> int:
    """The one dim that is indexed."""
    (dim,) = [d for d, x in enumerate(indices) if x is not None]
    return dim


def trailing_dims(call: LocalCall, dim: int) -> int:
    return call.args[0].meta["val"].dim() - 1 - dim


def replaced(indices: list, index: Node) -> list:
    return [index if x is not None else None for x in indices]


@if_split
def masked_index(call: LocalCall, insert: Insert) -> Node:
    """Reads, with a fill number for masked elements; or writes, with values."""
    table, mask, indices, given = call.args
    dim = place_of(indices)
    safe, valid = shifted(call, insert, indices[dim])
    both = insert(aten.bitwise_and.Tensor, mask, before(insert, valid, trailing_dims(call, dim)))
    return insert(call.target, table, both, replaced(indices, safe), given)
