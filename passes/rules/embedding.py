"""Table look-ups and their gradients: embedding, index, gather, scatter.

A split table (`indexed` letter) works on its own range of indices: the result is a masked partial sum, or a part.
"""
from __future__ import annotations

import torch

from passes.rules.base import Call, Operand, Rule, make_rule
from passes.rules.table import rule

aten = torch.ops.aten


@rule(aten.embedding.default, heavy=True)
def embedding(call: Call) -> Rule:
    index = [("i", d) for d in range(len(call.operands[1].shape))]
    return make_rule(
        call, [["v", "h"], index], [[*index, "h"]], summed=["v"], linear=[[0]], indexed={"v": 1}
    )


@rule(aten.embedding_dense_backward.default, heavy=True)
def embedding_dense_backward(call: Call) -> Rule:
    index = [("i", d) for d in range(len(call.operands[1].shape))]
    return make_rule(call, [[*index, "h"], index], [[None, "h"]], summed=index, linear=[[0]])


def _index_letters(call: Call, indices: list) -> tuple[list, dict[int, list], list[int]] | None:
    """Letters of the broadcast index shape, of every index operand, and the indexed dims (they must be adjacent)."""
    where = [d for d, x in enumerate(indices) if x is not None]
    if not where or where != list(range(where[0], where[-1] + 1)):
        return None
    operands = [indices[d].index for d in where]
    if any(call.operands[i].dtype == "bool" for i in operands):
        return None
    shape = torch.broadcast_shapes(*(call.operands[i].shape for i in operands))
    own = {}
    for i in operands:
        s = call.operands[i].shape
        shift = len(shape) - len(s)
        own[i] = [("i", d + shift) if s[d] == shape[d + shift] and s[d] > 1 else None for d in range(len(s))]
    letters = [("i", d) if n > 1 else None for d, n in enumerate(shape)]
    return letters, own, where


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Rule | None:
    indices = list(call.args[1])
    found = _index_letters(call, indices)
    if found is None:
        return None
    letters, own, where = found
    rank = len(call.operands[0].shape)
    table: list = [d for d in range(rank)]
    single = len(where) == 1
    if not single:
        for d in where:
            table[d] = None
    inputs: list = [None] * len(call.operands)
    inputs[0] = table
    for i, x in own.items():
        inputs[i] = x
    out = [table[d] for d in range(where[0])] + letters + [table[d] for d in range(where[-1] + 1, rank)]
    indexed = {where[0]: indices[where[0]].index} if single else {}
    return make_rule(call, inputs, [out], summed=list(indexed), linear=[[0]], indexed=indexed)


def _put(call: Call, indices: list, values: int, mask: int | None, accumulate: bool) -> Rule | None:
    found = _index_letters(call, indices)
    if found is None:
        return None
    letters, own, where = found
    rank = len(call.results[0].shape)
    table: list = [d for d in range(rank)]
    single = len(where) == 1
    if not single or not accumulate:
        for d in where:
            table[d] = None
    full = [table[d] for d in range(where[0])] + letters + [table[d] for d in range(where[-1] + 1, rank)]
    sizes = [call.results[0].shape[d] for d in range(where[0])]
    sizes += list(torch.broadcast_shapes(*(call.operands[i].shape for i in own)))
    sizes += [call.results[0].shape[d] for d in range(where[-1] + 1, rank)]

    def aligned(operand: int) -> list:
        s = call.operands[operand].shape
        shift = len(full) - len(s)
        return [full[d + shift] if s[d] == sizes[d + shift] and s[d] > 1 else None for d in range(len(s))]

    inputs: list = [None] * len(call.operands)
    inputs[0] = table
    for i, x in own.items():
        inputs[i] = x
    inputs[values] = aligned(values)
    if mask is not None:
        # A mask of lower rank than the index lines up with its leading dims.
        s = call.operands[mask].shape
        inputs[mask] = [full[d] if d < len(full) and s[d] == sizes[d] and s[d] > 1 else None for d in range(len(s))] \
            if len(s) < len(full) else aligned(mask)
    if any(x is None for x in inputs):
        return None
    summed = [x for x in letters if x is not None] if accumulate else ()
    return make_rule(
        call, inputs, [table], summed=summed, blocked=() if accumulate else [x for x in letters if x is not None],
        linear=[[0, values]] if accumulate else (), addends=[0] if accumulate else (),
        indexed={where[0]: indices[where[0]].index} if single and accumulate else {},
    )


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> Rule | None:
    accumulate = bool(call.argument(3, "accumulate", False))
    if not all(isinstance(x, Operand) or x is None for x in call.args[1]) or not isinstance(call.args[2], Operand):
        return None
    return _put(call, list(call.args[1]), call.args[2].index, None, accumulate)


@rule(aten._unsafe_masked_index_put_accumulate.default, heavy=True)
def masked_index_put_accumulate(call: Call) -> Rule | None:
    """args: self, mask, indices, values"""
    return _put(call, list(call.args[2]), call.args[3].index, call.args[1].index, True)


@rule(aten._unsafe_masked_index.default)
def masked_index(call: Call) -> Rule | None:
    """args: self, mask, indices, fill"""
    found = _index_letters(call, list(call.args[2]))
    if found is None:
        return None
    letters, own, where = found
    rank = len(call.operands[0].shape)
    table: list = [None if d in where else d for d in range(rank)]
    out = [table[d] for d in range(where[0])] + letters + [table[d] for d in range(where[-1] + 1, rank)]
    shape = call.results[0].shape
    inputs: list = [None] * len(call.operands)
    inputs[0] = table
    for i, x in own.items():
        inputs[i] = x
    mask = call.args[1].index
    s = call.operands[mask].shape
    shift = len(shape) - len(s)
    inputs[mask] = [out[d + shift] if s[d] == shape[d + shift] else None for d in range(len(s))]
    return make_rule(call, inputs, [out], linear=[[0]] if call.args[3] == 0 else ())


@rule(aten.index_select.default)
def index_select(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dim = call.args[1] % rank
    table: list = list(range(rank))
    out = list(table)
    out[dim] = "i"
    return make_rule(call, [table, ["i"] if call.operands[1].shape else []], [out], summed=[dim], linear=[[0]],
                     indexed={dim: 1})


@rule(aten.gather.default)
def gather(call: Call) -> Rule:
    table, index = call.operands[0].shape, call.operands[1].shape
    dim = call.args[1] % max(len(table), 1)
    letters = [d if table[d] == index[d] else None for d in range(len(table))]
    a, b = list(letters), list(letters)
    a[dim], b[dim] = "v", "i"
    return make_rule(call, [a, b], [b], summed=["v"], linear=[[0]], indexed={"v": 1})


def _scatter(call: Call, sources: list[int], linear: list[list[int]], add: bool) -> Rule:
    table, index = call.operands[0].shape, call.operands[1].shape
    dim = call.args[1] % max(len(table), 1)
    shapes = [table, index] + [call.operands[i].shape for i in sources]
    letters = [d if len({s[d] for s in shapes}) == 1 else None for d in range(len(table))]
    a, b = list(letters), list(letters)
    a[dim], b[dim] = "v", None
    return make_rule(call, [a, b] + [b] * len(sources), [a], linear=linear, indexed={"v": 1})


@rule(aten.scatter.value)
def scatter_value(call: Call) -> Rule:
    return _scatter(call, [], [], False)


@rule(aten.scatter.src)
def scatter_src(call: Call) -> Rule:
    return _scatter(call, [2], [[0, 2]], False)


@rule(aten.scatter_add.default)
def scatter_add(call: Call) -> Rule:
    return _scatter(call, [2], [[0, 2]], True)
