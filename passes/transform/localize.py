"""Turn the arguments of a whole call into those of the call on local tensors.

Most operators need nothing: the local call on local operands gives the local result. What carries sizes (`view`,
`full`) gets local ones, and what carries indices into a split dim is shifted into the rank's own range and masked.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from passes.rules.base import Rule
from passes.transform.collectives import reshape
from passes.transform.insert import Inserter

aten = torch.ops.aten


@dataclass(frozen=True)
class Local:
    """One call to be localized: `args`/`kwargs` hold the local operands; shapes are those of the results."""

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    whole: tuple[tuple[int, ...], ...]
    local: tuple[tuple[int, ...], ...]
    rule: Rule | None
    ranges: Mapping[int, tuple[int, int]]
    """Operand that holds indices -> (first index, number) of this rank's range, where the indexed dim is split."""
    ordered: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Dim of the first result whose positions count -> (first position, number) of this rank's range, where it is split."""

    def ratio(self, dim: int) -> int:
        return self.whole[0][dim] // max(self.local[0][dim], 1)


SIZES_AT = {
    aten.expand.default: 1, aten.full.default: 0, aten.empty.memory_format: 0, aten.zeros.default: 0,
    aten.ones.default: 0, aten.new_full.default: 1,
}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def localize(call: Local, insert: Inserter) -> Node:
    """Emit the local call; returns its node."""
    if call.target in VIEWS:
        return reshape(insert, call.args[0], call.local[0])
    special = INDEXED if call.ranges else SPECIAL
    if call.target in special:
        return special[call.target](call, insert)
    if call.ranges:
        raise AssertionError(f"{call.target}: no way to index a split dim")
    args = list(call.args)
    if call.target in SIZES_AT:
        args[SIZES_AT[call.target]] = list(call.local[0])
    return insert(call.target, *args, **call.kwargs)


def _bound(bound: int | None, ratio: int, size: int) -> int | None:
    return bound if bound is None or bound >= size else bound // ratio


def _window(call: Local, insert: Inserter, first: int) -> Node:
    """slice and slice_scatter: `first` is the position of dim among the arguments."""
    args = list(call.args)
    dim = (args[first] if len(args) > first else 0) % len(call.whole[0])
    ratio = call.ratio(dim)
    if ratio > 1:
        size = max(call.whole[0][dim], (args[0].meta["val"].shape[dim]) * ratio)
        for k in (first + 1, first + 2):
            if len(args) > k:
                args[k] = _bound(args[k], ratio, size)
    return insert(call.target, *args, **call.kwargs)


def _split(call: Local, insert: Inserter) -> Node:
    args = list(call.args)
    dim = (args[2] if len(args) > 2 else call.kwargs.get("dim", 0)) % len(call.whole[0])
    args[1] = args[1] // call.ratio(dim) if isinstance(args[1], int) else [s // call.ratio(dim) for s in args[1]]
    return insert(call.target, *args, **call.kwargs)


def _convolution_backward(call: Local, insert: Inserter) -> Node:
    args = list(call.args)
    if args[3] is not None:  # sizes of the bias: output channels, as grad_output has them locally
        channels = args[0].meta["val"].shape[1]
        args[3] = [channels]
    return insert(call.target, *args, **call.kwargs)


SPECIAL: dict[Any, Callable[[Local, Inserter], Node]] = {
    aten.slice.Tensor: lambda c, i: _window(c, i, 1),
    aten.slice_scatter.default: lambda c, i: _window(c, i, 2),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.convolution_backward.default: _convolution_backward,
}


# --- indices into a split dim ------------------------------------------------------------------------------------------


def _own(insert: Inserter, index: Node, first: int, count: int, whole: int | None = None) -> tuple[Node, Node]:
    """(index shifted into this rank's range, whether it lies there); negative indices count from the end of `whole`."""
    if whole is not None:
        wrapped = insert(aten.add.Tensor, index, whole)
        index = insert(aten.where.self, insert(aten.lt.Scalar, index, 0), wrapped, index)
    shifted = insert(aten.sub.Tensor, index, first)
    valid = insert(aten.bitwise_and.Tensor, insert(aten.ge.Scalar, shifted, 0), insert(aten.lt.Scalar, shifted, count))
    return insert(aten.mul.Tensor, shifted, valid), valid


def _masked(insert: Inserter, x: Node, valid: Node, trailing: int = 0) -> Node:
    for _ in range(trailing):
        valid = insert(aten.unsqueeze.default, valid, -1)
    zero = insert(aten.full.default, [], 0, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
    return insert(aten.where.self, valid, x, zero)


def _embedding(call: Local, insert: Inserter) -> Node:
    weight, index = call.args[:2]
    (first, count), = call.ranges.values()
    safe, valid = _own(insert, index, first, count)
    return _masked(insert, insert(call.target, weight, safe), valid, 1)


def _index(call: Local, insert: Inserter) -> Node:
    table, indices = call.args
    (first, count), = call.ranges.values()
    (dim,) = [d for d, x in enumerate(indices) if x is not None]
    safe, valid = _own(insert, indices[dim], first, count, count * _parts(call, dim))
    picked = insert(call.target, table, [safe if x is not None else None for x in indices])
    return _masked(insert, picked, valid, len(table.meta["val"].shape) - 1 - dim)


def _parts(call: Local, dim: int) -> int:
    table = call.args[0].meta["val"]
    assert call.rule is not None
    (letter,) = call.rule.indexed
    return call.rule.sizes[letter] // int(table.shape[dim])


def _gather(call: Local, insert: Inserter) -> Node:
    table, dim, index = call.args[:3]
    (first, count), = call.ranges.values()
    safe, valid = _own(insert, index, first, count)
    return _masked(insert, insert(call.target, table, dim, safe), valid)


def _index_select(call: Local, insert: Inserter) -> Node:
    table, dim, index = call.args
    (first, count), = call.ranges.values()
    safe, valid = _own(insert, index, first, count)
    rank = len(table.meta["val"].shape)
    return _masked(insert, insert(call.target, table, dim, safe), valid, rank - 1 - dim % rank)


def _scatter(call: Local, insert: Inserter) -> Node:
    """What falls outside of the range goes into one more slot, which is cut off."""
    table, dim, index, *rest = call.args
    (first, count), = call.ranges.values()
    rank = len(table.meta["val"].shape)
    dim %= rank
    shifted, valid = _own(insert, index, first, count)
    spare = insert(aten.full.default, [], count, dtype=index.meta["val"].dtype, device=index.meta["val"].device)
    slot = insert(aten.where.self, valid, shifted, spare)
    pads = [0] * (2 * (rank - 1 - dim)) + [0, 1]
    padded = insert(aten.constant_pad_nd.default, table, pads, 0)
    scattered = insert(call.target, padded, dim, slot, *rest, **call.kwargs)
    return insert(aten.slice.Tensor, scattered, dim, 0, count)


def _masked_put(call: Local, insert: Inserter) -> Node:
    table, mask, indices, values = call.args
    (first, count), = call.ranges.values()
    (dim,) = [d for d, x in enumerate(indices) if x is not None]
    safe, valid = _own(insert, indices[dim], first, count)
    while len(valid.meta["val"].shape) < len(mask.meta["val"].shape):
        valid = insert(aten.unsqueeze.default, valid, -1)
    both = insert(aten.bitwise_and.Tensor, mask, valid)
    return insert(call.target, table, both, [safe if x is not None else None for x in indices], values)


def _index_put(call: Local, insert: Inserter) -> Node:
    table, indices, values, *rest = call.args
    (first, count), = call.ranges.values()
    (dim,) = [d for d, x in enumerate(indices) if x is not None]
    safe, valid = _own(insert, indices[dim], first, count, count * _parts(call, dim))
    trailing = len(table.meta["val"].shape) - 1 - dim
    own = _masked(insert, values, valid, min(trailing, max(len(values.meta["val"].shape) - 1, 0)))
    return insert(call.target, table, [safe if x is not None else None for x in indices], own, *rest)


INDEXED: dict[Any, Callable[[Local, Inserter], Node]] = {
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.scatter.value: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten._unsafe_masked_index_put_accumulate.default: _masked_put,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
}


def shifted_ranges(
    rule: Rule | None, split: Callable[[bool, int, int], tuple[int, int] | None]
) -> dict[int, tuple[int, int]]:
    """Operand that holds indices -> this rank's range, for every indexed letter whose dim is split.

    `split(is_input, tensor, dim)` gives (first index, number) of a split dim, or None.
    """
    found: dict[int, tuple[int, int]] = {}
    if rule is None:
        return found
    for letter, operand in rule.indexed.items():
        for is_input, tensors in ((True, rule.inputs), (False, rule.outputs)):
            for t, dims in enumerate(tensors):
                for d, row in enumerate(dims):
                    own = split(is_input, t, d) if letter in row else None
                    if own is not None:
                        found[operand] = own
    return found


def ordered_ranges(
    rule: Rule | None, split: Callable[[bool, int, int], tuple[int, int] | None]
) -> dict[int, tuple[int, int]]:
    """Dim of the first result -> this rank's range, for every ordered letter whose dim is split; `split` as above."""
    if rule is None or not rule.ordered:
        return {}
    ranges = {d: split(False, 0, d) for d, row in enumerate(rule.outputs[0]) if rule.ordered.intersection(row)}
    return {d: own for d, own in ranges.items() if own is not None}
