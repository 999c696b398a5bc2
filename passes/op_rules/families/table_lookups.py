"""Sharding rules for lookups: embedding, index, gather.

A table sharded along its indexed dim (`indexed` letter) looks up its own range of indices: the result is a masked partial
sum.
"""
from __future__ import annotations

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Rule, aligned, make_rule
from passes.op_rules.local_call import Insert, LocalCall, last_stride_is_one
from passes.op_rules.rule_table import rule
from passes.op_rules.shifted_indices import before, if_split, masked, place_of, replaced, shifted, trailing_dims
from passes.op_rules.shifted_indices import masked_index as local_masked_index

aten = torch.ops.aten
rule(aten.index.Tensor, aten.gather.default, fusion="fuses")
rule(aten._unsafe_index.Tensor, fusion="inlined")


@if_split
def _local_embedding(call: LocalCall, insert: Insert) -> Node:
    safe, valid = shifted(call, insert, call.args[1])
    return masked(insert, insert(call.target, call.args[0], safe), before(insert, valid, 1))


@rule(aten.embedding.default, heavy="embedding", fusion="fuses", local=_local_embedding)
def embedding(call: Call) -> Rule:
    index = [("i", d) for d in range(len(call.operands[1].shape))]
    return make_rule(
        call, [["v", "h"], index], [[*index, "h"]], summed=["v"], linear=[[0]], indexed={"v": 1},
        roles={"v": "vocabulary", "h": "features", **dict.fromkeys(index, "sequence")},
    )


@rule(aten.embedding_dense_backward.default, heavy="embedding")
def embedding_dense_backward(call: Call) -> Rule:
    """args: gradient, indices, number of rows, padding index, scale_grad_by_freq"""
    index = [("i", d) for d in range(len(call.operands[1].shape))]
    return make_rule(
        call, [[*index, "h"], index], [[None, "h"]], summed=() if call.args[4] else index,
        blocked=index if call.args[4] else (), linear=[[0]],
    )


MAX = 2
"""The mode "max" of embedding bags: the position of each maximum is among the results."""


def _packed(value: torch.Tensor) -> bool:
    """The strides of embedding bags decide which results are filled."""
    return value.is_contiguous() and last_stride_is_one(value)


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, heavy="embedding", layout=_packed)
def embedding_bag(call: Call) -> Rule | None:
    """Bags have data-dependent bounds, so only columns can be sharded; results other than the first are for backward.

    args: weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, ...
    """
    others = [[None] * len(o.shape) for o in call.operands[1:]]
    results: list[list[str | None]] = [[None] * len(r.shape) for r in call.results[1:]]
    greatest = call.argument(4, "mode", 0) == MAX and len(call.results) == 4 and len(results[2]) == 2
    if greatest:
        results[2] = [None, "h"]
    return make_rule(call, [[None, "h"], *others], [[None, "h"], *results],
                     aside=[k for k in range(1, len(call.results)) if k != 3 or not greatest])


@rule(aten._embedding_bag_backward.default, heavy="embedding")
def embedding_bag_backward(call: Call) -> Rule | None:
    """args: gradient, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, ..."""
    inputs = [[None, "h"], *([None] * len(o.shape) for o in call.operands[1:])]
    if call.args[8] == MAX:
        inputs[call.args[5].index] = [None, "h"]
    return make_rule(call, inputs, [[None, "h"]], linear=[[0]])


def index_letters(call: Call, indices: list) -> tuple[list, dict[int, list], list[int]] | None:
    """Letters of the broadcast index shape, letters of every index operand, and the indexed dims.

    None if there is no rule: with a mask among the indices the shape of the result depends on data.
    """
    where = [d for d, x in enumerate(indices) if x is not None]
    if not where:
        return None
    operands = [indices[d].index for d in where]
    if any(call.operands[i].dtype in ("bool", "uint8") for i in operands):
        return None
    shape = torch.broadcast_shapes(*(call.operands[i].shape for i in operands))
    letters = [("i", d) for d in range(len(shape))]
    return letters, {i: aligned(letters, call.operands[i].shape, shape) for i in operands}, where


def in_place(dims: list | tuple[int, ...], where: list[int], letters: list | tuple[int, ...]) -> list:
    """Dims of an indexing result: the table's, with the index's dims in place of the first indexed dim if the indexed dims
    are adjacent, else before all others."""
    adjacent = where == list(range(where[0], where[-1] + 1))
    rest = [x for d, x in enumerate(dims) if d not in where]
    at = where[0] if adjacent else 0
    return [*rest[:at], *letters, *rest[at:]]


@if_split
def _local_index(call: LocalCall, insert: Insert) -> Node:
    table, indices = call.args
    dim = place_of(indices)
    safe, valid = shifted(call, insert, indices[dim], wraps=True)
    picked = insert(call.target, table, replaced(indices, safe))
    return masked(insert, picked, before(insert, valid, trailing_dims(call, dim)))


@rule(aten.index.Tensor, aten._unsafe_index.Tensor, local=_local_index)
def index(call: Call) -> Rule | None:
    return _index(call, list(call.args[1]), None, True)


@rule(aten._unsafe_masked_index.default, local=local_masked_index)
def masked_index(call: Call) -> Rule | None:
    """args: self, mask, indices, fill value where the mask is false"""
    return _index(call, list(call.args[2]), call.args[1].index, call.args[3] == 0)


def _index(call: Call, indices: list, mask: int | None, else_zero: bool) -> Rule | None:
    found = index_letters(call, indices)
    if found is None:
        return None
    letters, own, where = found
    table: list = list(range(len(call.operands[0].shape)))
    single = len(where) == 1 and else_zero
    if not single:
        for d in where:
            table[d] = None
    out = in_place(table, where, letters)
    inputs: list = [None] * len(call.operands)
    inputs[0] = table
    for i, x in own.items():
        inputs[i] = x
    if mask is not None:
        inputs[mask] = aligned(out, call.operands[mask].shape, call.results[0].shape)
    indexed = {where[0]: indices[where[0]].index} if single else {}
    return make_rule(
        call, inputs, [out], summed=list(indexed), linear=[[0]] if else_zero else (), indexed=indexed
    )


@if_split
def _local_index_select(call: LocalCall, insert: Insert) -> Node:
    table, dim, index = call.args
    safe, valid = shifted(call, insert, index)
    trailing = trailing_dims(call, dim % max(table.meta["val"].dim(), 1))
    return masked(insert, insert(call.target, table, dim, safe), before(insert, valid, trailing))


@rule(aten.index_select.default, local=_local_index_select)
def index_select(call: Call) -> Rule:
    """args: self, dim, index (one dim, or none for a single element)"""
    table: list = list(range(len(call.operands[0].shape)))
    dim = call.args[1] % max(len(table), 1)
    out = list(table)
    out[dim] = "i" if call.operands[1].shape else None
    return make_rule(
        call, [table, ["i"] if call.operands[1].shape else []], [out], summed=[dim], linear=[[0]], indexed={dim: 1}
    )


@if_split
def _local_gather(call: LocalCall, insert: Insert) -> Node:
    safe, valid = shifted(call, insert, call.args[2])
    return masked(insert, insert(call.target, call.args[0], call.args[1], safe), valid)


@rule(aten.gather.default, local=_local_gather)
def gather(call: Call) -> Rule:
    """args: self, dim, index; other dims in which the index is smaller than the table stay whole"""
    table, index = call.operands[0].shape, call.operands[1].shape
    if not table or len(table) != len(index):  # an empty index may have any dims
        return make_rule(call, [[None] * len(table), [None] * len(index)], [[None] * len(index)], linear=[[0]])
    dim = call.args[1] % len(table)
    letters: list = [d if table[d] == index[d] else None for d in range(len(table))]
    a, b = list(letters), list(letters)
    a[dim], b[dim] = "v", "i"
    return make_rule(call, [a, b], [b], summed=["v"], linear=[[0]], indexed={"v": 1}, roles={"v": "classes"})
