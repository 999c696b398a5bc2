"""Local calls of operators that index a split dim: each rank reads or writes the indices in its own range.

Indices are shifted by the start of the range. Indices outside are read at 0 and masked, or written to a spare slot.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.local_call import LocalCall, ShardRange

aten = torch.ops.aten


def _range(call: LocalCall) -> ShardRange:
    (own,) = call.ranges.values()
    return own


def _whole(call: LocalCall) -> int:
    """Size of the indexed dim."""
    assert call.rule is not None
    (letter,) = call.rule.indexed
    return call.rule.sizes[letter]


def _own(call: LocalCall, insert: CallInserter, index: Node, wraps: bool = False) -> tuple[Node, Node]:
    """(index shifted into this rank's range, or 0; whether it lies there). `wraps`: negative ones count from the end."""
    own = _range(call)
    if wraps:
        index = insert(aten.where.self, insert(aten.lt.Scalar, index, 0), insert(aten.add.Tensor, index, _whole(call)), index)
    if call.at_run_time:
        shifted = insert(aten.sub.Tensor, index, own.start_node(insert, index.meta["val"].device))
    else:
        shifted = own.marked(insert(aten.sub.Tensor, index, own.first))
    valid = insert(aten.bitwise_and.Tensor, insert(aten.ge.Scalar, shifted, 0), insert(aten.lt.Scalar, shifted, own.count))
    return insert(aten.mul.Tensor, shifted, valid), valid


def _before(insert: CallInserter, x: Node, trailing: int) -> Node:
    """A mask over indices, broadcast to values with `trailing` more dims."""
    for _ in range(trailing):
        x = insert(aten.unsqueeze.default, x, -1)
    return x


def _masked(insert: CallInserter, x: Node, valid: Node) -> Node:
    zero = insert(aten.full.default, [], 0, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
    return insert(aten.where.self, valid, x, zero)


def _embedding(call: LocalCall, insert: CallInserter) -> Node:
    safe, valid = _own(call, insert, call.args[1])
    return _masked(insert, insert(call.target, call.args[0], safe), _before(insert, valid, 1))


def _place(indices: list) -> int:
    (dim,) = [d for d, x in enumerate(indices) if x is not None]
    return dim


def _trailing(call: LocalCall, dim: int) -> int:
    return call.args[0].meta["val"].dim() - 1 - dim


def _index(call: LocalCall, insert: CallInserter) -> Node:
    table, indices = call.args
    dim = _place(indices)
    safe, valid = _own(call, insert, indices[dim], wraps=True)
    picked = insert(call.target, table, [safe if x is not None else None for x in indices])
    return _masked(insert, picked, _before(insert, valid, _trailing(call, dim)))


def _masked_index(call: LocalCall, insert: CallInserter) -> Node:
    """Reads, with a fill number for masked elements; or writes, with values."""
    table, mask, indices, given = call.args
    dim = _place(indices)
    safe, valid = _own(call, insert, indices[dim])
    both = insert(aten.bitwise_and.Tensor, mask, _before(insert, valid, _trailing(call, dim)))
    return insert(call.target, table, both, [safe if x is not None else None for x in indices], given)


def _gather(call: LocalCall, insert: CallInserter) -> Node:
    safe, valid = _own(call, insert, call.args[2])
    return _masked(insert, insert(call.target, call.args[0], call.args[1], safe), valid)


def _index_select(call: LocalCall, insert: CallInserter) -> Node:
    table, dim, index = call.args
    safe, valid = _own(call, insert, index)
    return _masked(insert, insert(call.target, table, dim, safe), _before(insert, valid, _trailing(call, dim % max(
        table.meta["val"].dim(), 1))))


def _scatter(call: LocalCall, insert: CallInserter) -> Node:
    """Indices outside of the range go to one more slot, which is cut off."""
    table, dim, index, *rest = call.args
    count = _range(call).count
    rank = table.meta["val"].dim()
    dim %= rank
    shifted, valid = _own(call, insert, index)
    spare = insert(aten.full.default, [], count, dtype=index.meta["val"].dtype, device=index.meta["val"].device)
    slot = insert(aten.where.self, valid, shifted, spare)
    pads = [0] * (2 * (rank - 1 - dim)) + [0, 1]
    padded = insert(aten.constant_pad_nd.default, table, pads, 0)
    scattered = insert(call.target, padded, dim, slot, *rest, **call.kwargs)
    return insert(aten.slice.Tensor, scattered, dim, 0, count)


def _index_put(call: LocalCall, insert: CallInserter) -> Node:
    """Values are accumulated, so zeros may be written anywhere."""
    table, indices, values, *rest = call.args
    dim = _place(indices)
    safe, valid = _own(call, insert, indices[dim], wraps=True)
    own = _masked(insert, values, _before(insert, valid, _trailing(call, dim)))
    return insert(call.target, table, [safe if x is not None else None for x in indices], own, *rest, **call.kwargs)


INDEXED: dict[Any, Callable[[LocalCall, CallInserter], Node]] = {
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten._unsafe_masked_index.default: _masked_index,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.scatter.value: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten.scatter_reduce.two: _scatter,
    aten.index_add.default: _scatter,
    aten._unsafe_masked_index_put_accumulate.default: _masked_index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
}
