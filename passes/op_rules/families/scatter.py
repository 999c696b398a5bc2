"""Sharding rules for writes by index: index_put, scatter, and accumulating forms (gradients of lookups).

A sharded table takes the writes into its own range. If values are accumulated, the rows that are written can be sharded
too: then each rank has a partial sum, and the table that they are added to must be a partial sum as well.
"""
# A rule is only called for its operators, so the number and types of arguments are known.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Rule, aligned, make_rule
from passes.op_rules.families.table_lookups import in_place, index_letters
from passes.op_rules.local_call import Insert, LocalCall
from passes.op_rules.rule_table import rule
from passes.op_rules.shifted_indices import (
    before,
    from_start,
    if_split,
    masked,
    masked_index,
    place_of,
    range_of,
    replaced,
    shifted,
    trailing_dims,
)

aten = torch.ops.aten
rule("aten::scatter.reduce", "aten::scatter.value_reduce", fusion="scatters")


def _put(call: Call, indices: list, values: int, mask: int | None, accumulate: bool) -> Rule | None:
    found = index_letters(call, indices)
    if found is None:
        return None
    letters, own, where = found
    shape = call.results[0].shape
    table: list = list(range(len(shape)))
    single = len(where) == 1 and accumulate
    if not single:
        for d in where:
            table[d] = None
    written = in_place(table, where, letters)
    index_shape = torch.broadcast_shapes(*(call.operands[i].shape for i in own))
    sizes = in_place(shape, where, index_shape)
    inputs: list = [None] * len(call.operands)
    inputs[0] = table
    for i, x in own.items():
        inputs[i] = x
    for i in (values,) if mask is None else (values, mask):
        inputs[i] = aligned(written, call.operands[i].shape, sizes)
    return make_rule(
        call, inputs, [table], summed=letters if accumulate else (), blocked=() if accumulate else letters,
        linear=[[0, values]] if accumulate else (), addends=[0] if accumulate else (),
        indexed={where[0]: indices[where[0]].index} if single else {},
    )


def _put_where(call: Call, mask: int, first: int) -> Rule | None:
    """`self[..., mask] = values`, with the mask over dims from `first` on: pointwise if values are broadcast over the mask."""
    table = list(range(len(call.results[0].shape)))
    behind = first + len(call.operands[mask].shape)
    values = next(i for i in range(1, len(call.operands)) if i != mask)
    shape = (*call.results[0].shape[:first], 1, *call.results[0].shape[behind:])
    own = call.operands[values].shape
    if len(own) > len(shape) - 1 - first and own[len(own) - (len(shape) - first)] != 1:
        return None  # one value per masked element: their positions depend on the mask
    inputs: list = [None] * len(call.operands)
    inputs[0], inputs[mask] = table, table[first:behind]
    inputs[values] = aligned([*table[:first], None, *table[behind:]], own, shape)
    return make_rule(call, inputs, [table], linear=[[0, values]])


@if_split
def _local_index_put(call: LocalCall, insert: Insert) -> Node:
    """Values are accumulated, so zeros may be written anywhere."""
    table, indices, values, *rest = call.args
    dim = place_of(indices)
    safe, valid = shifted(call, insert, indices[dim], wraps=True)
    own = masked(insert, values, before(insert, valid, trailing_dims(call, dim)))
    return insert(call.target, table, replaced(indices, safe), own, *rest, **call.kwargs)


@rule(aten.index_put.default, aten._unsafe_index_put.default, fusion="scatters", local=_local_index_put)
def index_put(call: Call) -> Rule | None:
    """args: self, indices, values, accumulate"""
    given = [x for x in call.args[1] if x is not None]
    if len(given) == 1 and call.operands[given[0].index].dtype == "bool":
        return _put_where(call, given[0].index, len(call.args[1]) - 1)
    return _put(call, list(call.args[1]), call.args[2].index, None, bool(call.argument(3, "accumulate", False)))


@rule(aten._unsafe_masked_index_put_accumulate.default, heavy="embedding", local=masked_index)
def masked_index_put_accumulate(call: Call) -> Rule | None:
    """args: self, mask, indices, values"""
    return _put(call, list(call.args[2]), call.args[3].index, call.args[1].index, True)


@if_split
def _local_scatter(call: LocalCall, insert: Insert) -> Node:
    """Indices outside of the range go to one more slot, which is cut off."""
    table, dim, index, *rest = call.args
    count = range_of(call).count
    rank = table.meta["val"].dim()
    dim %= rank
    moved, valid = shifted(call, insert, index)
    spare = insert(aten.full.default, [], count, dtype=index.meta["val"].dtype, device=index.meta["val"].device)
    slot = insert(aten.where.self, valid, moved, spare)
    pads = [0] * (2 * (rank - 1 - dim)) + [0, 1]
    padded = insert(aten.constant_pad_nd.default, table, pads, 0)
    scattered = insert(call.target, padded, dim, slot, *rest, **call.kwargs)
    return insert(aten.slice.Tensor, scattered, dim, 0, count)


@if_split
def _local_scatter_value(call: LocalCall, insert: Insert) -> Node:
    """With one index for each place of the other dims, as in the gradient of a cross entropy, positions are compared with it:
    that fuses with what reads the result, which is then never stored (inductor does the same for dims that are not split)."""
    table, dim, index, value = call.args
    shape, index_shape = list(table.meta["val"].shape), list(index.meta["val"].shape)
    dim %= len(shape)
    shape[dim] = 1
    if index_shape != shape:
        return _local_scatter(call, insert)
    kind = {"dtype": index.meta["val"].dtype, "device": index.meta["val"].device}
    count = range_of(call).count
    places = insert(aten.arange.start_step, 0, count, 1, **kind)
    places = insert(aten.view.default, places, [count if d == dim else 1 for d in range(len(shape))])
    here = insert(aten.eq.Tensor, from_start(call, insert, index), places)
    written = insert(aten.full.default, [], value, dtype=table.meta["val"].dtype, device=table.meta["val"].device)
    return insert(aten.where.self, here, written, table)


rule(aten.scatter.value, local=_local_scatter_value)
rule(aten.scatter.src, aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default, local=_local_scatter)


def _scatter(call: Call, adds: bool, linear: bool) -> Rule:
    """args: self, dim, index, and a source with the index's rank or a number

    Dims other than `dim` in which index or source are smaller than the table stay whole.
    """
    table, index = call.operands[0].shape, call.operands[1].shape
    source = call.operands[2].shape if len(call.operands) > 2 else None
    if not table or len(table) != len(index):  # an empty index may have any dims
        return make_rule(call, [[None] * len(o.shape) for o in call.operands], [[None] * len(table)])
    dim = call.args[1] % len(table)
    shapes = [table, index] + ([] if source is None else [source])
    letters: list = [d if len({s[d] for s in shapes}) == 1 else None for d in range(len(table))]
    a, b = list(letters), list(letters)
    a[dim], b[dim] = "v", "i" if adds and index[dim] == source[dim] else None
    return make_rule(
        call, [a] + [b] * (len(shapes) - 1), [a], summed="i" if adds else (), linear=[[0, 2]] if linear else (),
        addends=[0] if adds else (), indexed={"v": 1},
    )


@rule(aten.scatter.value, fusion="scatters")
def scatter_value(call: Call) -> Rule:
    return _scatter(call, False, False)


@rule(aten.scatter.src, fusion="scatters")
def scatter_src(call: Call) -> Rule:
    return _scatter(call, False, True)


@rule(aten.scatter_add.default, fusion="scatters")
def scatter_add(call: Call) -> Rule:
    return _scatter(call, True, True)


@rule(aten.scatter_reduce.two)
def scatter_reduce(call: Call) -> Rule:
    """args: self, dim, index, source, "sum", "prod", "mean", "amax" or "amin"; include_self"""
    adds = call.args[4] == "sum"
    return _scatter(call, adds and call.argument(5, "include_self", True), adds)


@rule(aten.index_reduce.default)
def index_reduce(call: Call) -> Rule:
    """args: self, dim, index (one dim), source, "prod", "mean", "amax" or "amin"; include_self"""
    table: list = list(range(len(call.operands[0].shape)))
    if table:
        table[call.args[1] % len(table)] = None
    return make_rule(call, [table, [None] * len(call.operands[1].shape), table[: len(call.operands[2].shape)]], [table])


@rule(aten.index_add.default)
def index_add(call: Call) -> Rule:
    """args: self, dim, index (one dim), source; alpha"""
    table: list = list(range(len(call.operands[0].shape)))
    if not table:
        return make_rule(call, [[], [None] * len(call.operands[1].shape), []], [[]], linear=[[0, 2]])
    dim = call.args[1] % len(table)
    source = list(table)
    source[dim] = "i"
    index = ["i"] if call.operands[1].shape else []
    return make_rule(
        call, [table, index, source], [table], summed="i", linear=[[0, 2]], addends=[0], indexed={dim: 1}
    )
