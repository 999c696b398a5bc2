"""Sharding rules for views and copies that move elements: reshape, transpose, expand, repeat, roll."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.local_call import (
    Insert,
    LocalCall,
    is_contiguous,
    last_dim_packed,
    last_stride_is_one,
    packed_copy,
    reshape,
    reshaped,
)
from passes.op_rules.rule_table import rule

aten = torch.ops.aten
rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
     aten.squeeze.dims, local=reshaped)


def view_letters(old: tuple[int, ...], new: tuple[int, ...]):
    """Letters of a reshape: `(letters of old, letters of new, sizes, blocked letters)`, by common factors of both shapes.

    (6, 4) -> (2, 12) has letters of sizes 2, 3, 4: ([2 3], [4]) -> ([2], [3 4]). Both shapes are read from the outermost
    dim, and the next letter is the greatest common divisor of the remaining sizes of the two dims. Where that is 1, as in
    (3, 5) -> (5, 3), both sides get separate, blocked letters up to the next common boundary.
    """
    a: list[list] = [[] for _ in old]
    b: list[list] = [[] for _ in new]
    sizes: dict[object, int] = {}
    if 0 in old:
        return a, b, sizes, []
    i = j = 0
    rest_a = rest_b = 1
    while True:
        while rest_a == 1 and i < len(old):
            rest_a, i = old[i], i + 1
        while rest_b == 1 and j < len(new):
            rest_b, j = new[j], j + 1
        if rest_a == 1 or rest_b == 1:
            break
        common = math.gcd(rest_a, rest_b)
        if common > 1:
            letter = len(sizes)
            sizes[letter] = common
            a[i - 1].append(letter)
            b[j - 1].append(letter)
            rest_a //= common
            rest_b //= common
            continue
        part_a, part_b = rest_a, rest_b
        broken_a, broken_b = [i - 1], [j - 1]
        while part_a != part_b:
            if part_a < part_b:
                part_a, i = part_a * old[i], i + 1
                broken_a.append(i - 1)
            else:
                part_b, j = part_b * new[j], j + 1
                broken_b.append(j - 1)
        for row, shape, dims, tag in ((a, old, broken_a, "a"), (b, new, broken_b, "b")):
            for d in dims:
                done = math.prod(sizes[x] for x in row[d])
                if shape[d] > done:
                    sizes[tag, d] = shape[d] // done
                    row[d].append((tag, d))
        rest_a = rest_b = 1
    return a, b, sizes, [k for k in sizes if isinstance(k, tuple)]


def _reshape(call: Call, operand: int, linear: list[list[int]]) -> Rule:
    """Rule of a reshape of one operand; other operands have the shape of the result and are not read."""
    a, b, sizes, blocked = view_letters(call.operands[operand].shape, call.results[0].shape)
    a, b = ([row or None for row in side] for side in (a, b))
    inputs = [a if i == operand else b for i in range(len(call.operands))]
    return make_rule(call, inputs, [b], sizes=sizes, blocked=blocked, linear=linear)


@rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, view="whole",
)
def view(call: Call) -> Rule:
    return _reshape(call, 0, [[0]])


def _reads_memory(call: LocalCall, insert: Insert) -> Node:
    """The local call on a whole operand, whose strides a collective or another operator may have changed."""
    x, value = call.args[0], call.args[0].meta["val"]
    wanted = call.strides[0] if call.strides else value.stride()
    if tuple(value.stride()) != tuple(wanted):
        order = sorted(range(value.dim()), key=lambda d: -wanted[d])
        x = packed_copy(insert, insert(aten.permute.default, x, order))
        x = insert(aten.permute.default, x, [order.index(d) for d in range(value.dim())])
        sizes = value.shape
        if any(size > 1 and a != b for size, a, b in zip(sizes, x.meta["val"].stride(), wanted)):
            raise AssertionError(f"{call.target}: cannot lay out {tuple(sizes)} with strides {wanted}")
    return insert(call.target, x, *call.args[1:], **call.kwargs)


def _strided(operand: int) -> Callable[[LocalCall, Insert], Node]:
    """A reshape of an operand where there is a rule."""
    return lambda call, insert: _reads_memory(call, insert) if call.rule is None else reshape(
        insert, call.args[operand], call.local_shapes[0])


@rule(aten.as_strided.default, view="part", local=_strided(0))
def as_strided(call: Call) -> Rule | None:
    """A reshape if operand and result are contiguous and have as many elements; else there is no rule."""
    same = call.operands[0].elements == call.results[0].elements and not call.argument(3, "storage_offset", 0)
    if not same or not is_contiguous(call.operands[0].shape, call.strides[0]):
        return None
    return _reshape(call, 0, [[0]]) if is_contiguous(call.results[0].shape, call.args[2]) else None


@rule(aten.as_strided_scatter.default, local=_strided(1))
def as_strided_scatter(call: Call) -> Rule | None:
    """args: self, source, size, stride, offset; a reshape of the source if it covers all of self"""
    same = call.operands[0].elements == call.operands[1].elements and not call.argument(4, "storage_offset", 0)
    if not same or not is_contiguous(call.operands[0].shape, call.strides[0]):
        return None
    return _reshape(call, 1, [[1], [0, 1]]) if is_contiguous(call.operands[1].shape, call.args[3]) else None


@rule(aten.view.dtype, view="whole", layout=last_stride_is_one)
def view_dtype(call: Call) -> Rule:
    """Reinterpret the bits as another dtype; if the item size differs, the last dim changes and stays whole."""
    dims: list = list(range(len(call.results[0].shape)))
    if dims and call.operands[0].itemsize != call.results[0].itemsize:
        dims[-1] = None
    return make_rule(call, [dims], [dims])


@rule(aten.view_as_real.default)
def view_as_real(call: Call) -> Rule:
    dims = list(range(len(call.operands[0].shape)))
    return make_rule(call, [dims], [[*dims, None]], linear=[[0]])


@rule(aten.view_as_complex.default, layout=last_dim_packed)
def view_as_complex(call: Call) -> Rule:
    dims = list(range(len(call.results[0].shape)))
    return make_rule(call, [[*dims, None]], [dims], linear=[[0]])


@rule(aten.permute.default, view="whole")
def permute(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    return make_rule(call, [list(range(rank))], [[d % rank for d in call.args[1]]], linear=[[0]])


@rule(aten.t.default, view="whole")
def t(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    return make_rule(call, [list(range(rank))], [list(range(rank))[::-1]], linear=[[0]])


@rule(aten.transpose.int, view="whole")
def transpose(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    order = list(range(rank))
    i, j = call.args[1] % rank, call.args[2] % rank
    order[i], order[j] = order[j], order[i]
    return make_rule(call, [list(range(rank))], [order], linear=[[0]])


@rule(aten.expand.default, view="part", sizes=1)
def expand(call: Call) -> Rule:
    old, new = call.operands[0].shape, call.results[0].shape
    shift = len(new) - len(old)
    return make_rule(
        call,
        [[i + shift if old[i] == new[i + shift] else None for i in range(len(old))]],
        [list(range(len(new)))],
        linear=[[0]],
    )


def _repeat(call: LocalCall, insert: Insert) -> Node:
    """Repetitions per dim are the ratio of result to operand, and so are local ones."""
    own = [1] * (len(call.local_shapes[0]) - call.args[0].meta["val"].dim()) + list(call.args[0].meta["val"].shape)
    sizes = [n // size if size else t for n, size, t in zip(call.local_shapes[0], own, call.args[1])]
    return insert(call.target, call.args[0], sizes)


@rule(aten.repeat.default, fusion="inlined", local=_repeat)
def repeat(call: Call) -> Rule:
    """Every dim is (repetitions, dim of the operand), and either factor can be sharded."""
    old, new, times = call.operands[0].shape, call.results[0].shape, call.args[1]
    shift = len(new) - len(old)
    inputs = [i + shift for i in range(len(old))]
    out = [[("times", i), i] if i >= shift else [("times", i)] for i in range(len(new))]
    sizes = {**{("times", i): n for i, n in enumerate(times)}, **{i + shift: n for i, n in enumerate(old)}}
    if 0 in new:
        return make_rule(call, [[None] * len(old)], [[None] * len(new)])
    return make_rule(call, [inputs], [out], sizes=sizes, linear=[[0]])


@rule(aten.roll.default)
def roll(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dims = call.argument(2, "dims") or list(range(rank))
    moved = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    letters = [None if d in moved else d for d in range(rank)]
    return make_rule(call, [letters], [letters], linear=[[0]])


@rule(aten.diagonal.default, view="part")
def diagonal(call: Call) -> Rule:
    """args: self, offset, dim1, dim2"""
    whole, part = _diagonal_letters(call.operands[0].shape, call.argument(2, "dim1", 0), call.argument(3, "dim2", 1))
    return make_rule(call, [whole], [part], linear=[[0]])


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Rule:
    """args: self, source, offset, dim1, dim2"""
    whole, part = _diagonal_letters(call.results[0].shape, call.argument(3, "dim1", 0), call.argument(4, "dim2", 1))
    return make_rule(call, [whole, part], [whole], linear=[[0, 1]])


def _diagonal_letters(shape: tuple[int, ...], dim1: int, dim2: int) -> tuple[list, list]:
    taken = {dim1 % len(shape), dim2 % len(shape)}
    whole = [None if d in taken else d for d in range(len(shape))]
    return whole, [*(d for d in whole if d is not None), None]


@rule(aten.unfold.default)
def unfold(call: Call) -> Rule:
    """args: self, dim, size, step"""
    rank = len(call.operands[0].shape)
    letters: list = [None if d == call.args[1] % max(rank, 1) else d for d in range(rank)]
    return make_rule(call, [letters], [[*letters, None]], linear=[[0]])


@rule(aten.unfold_backward.default, sizes=1)
def unfold_backward(call: Call) -> Rule:
    """args: gradient, sizes of the operand, dim, size, step"""
    rank = len(call.results[0].shape)
    letters: list = [None if d == call.args[2] % max(rank, 1) else d for d in range(rank)]
    return make_rule(call, [[*letters, None]], [letters], linear=[[0]])
