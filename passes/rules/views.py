"""Views and copies that move elements: reshape, transpose, slice, concatenate, pad."""
from __future__ import annotations

import torch

from passes.rules.base import Call, Rule, make_rule
from passes.rules.table import rule

aten = torch.ops.aten


def view_letters(old: tuple[int, ...], new: tuple[int, ...]):
    """Letters of a reshape: `(entries of old, entries of new, sizes)`, in factors common to both shapes.

    (6, 4) -> (2, 12) has the letters 2, 3, 4: ([a b], c) -> (a, [b c]). Dims that share no factor boundary keep one
    outer letter if one size divides the other, and the rest of the group is not split.
    """
    a: list[list] = [[] for _ in old]
    b: list[list] = [[] for _ in new]
    sizes: dict[object, int] = {}
    i = j = 0
    rest_a = rest_b = 1
    while True:
        while rest_a == 1 and i < len(old):
            rest_a, i = old[i], i + 1
        while rest_b == 1 and j < len(new):
            rest_b, j = new[j], j + 1
        if rest_a == 1 or rest_b == 1:
            break
        # Both shapes are read from the outer side; the next common factor is the smaller rest if it divides.
        small, large = sorted((rest_a, rest_b))
        letter = len(sizes)
        if large % small == 0:
            sizes[letter] = small
            a[i - 1].append(letter)
            b[j - 1].append(letter)
            rest_a //= small
            rest_b //= small
            continue
        # No common boundary here: the inner parts of this group cannot be told apart. Close the group.
        pa, pb = rest_a, rest_b
        broken_a, broken_b = [i - 1], [j - 1]
        while pa != pb:
            if pa < pb:
                pa, i = pa * old[i], i + 1
                broken_a.append(i - 1)
            else:
                pb, j = pb * new[j], j + 1
                broken_b.append(j - 1)
        for row, shape, dims, tag in ((a, old, broken_a, "a"), (b, new, broken_b, "b")):
            for d in dims:
                done = 1
                for x in row[d]:
                    done *= sizes[x]
                if shape[d] > done:
                    key = (tag, d)
                    sizes[key] = shape[d] // done
                    row[d].append(key)
        rest_a = rest_b = 1
    blocked = [k for k in sizes if isinstance(k, tuple)]
    return a, b, sizes, blocked


@rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
)
def view(call: Call) -> Rule:
    a, b, sizes, blocked = view_letters(call.operands[0].shape, call.results[0].shape)
    return make_rule(call, [a], [b], sizes=sizes, blocked=blocked, linear=[[0]])


@rule(aten.permute.default)
def permute(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    return make_rule(call, [list(range(rank))], [[d % rank for d in call.args[1]]], linear=[[0]])


@rule(aten.t.default)
def t(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    return make_rule(call, [list(range(rank))], [list(range(rank))[::-1]], linear=[[0]])


@rule(aten.transpose.int)
def transpose(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    order = list(range(rank))
    i, j = call.args[1] % rank, call.args[2] % rank
    order[i], order[j] = order[j], order[i]
    return make_rule(call, [list(range(rank))], [order], linear=[[0]])


@rule(aten.expand.default)
def expand(call: Call) -> Rule:
    old, new = call.operands[0].shape, call.results[0].shape
    shift = len(new) - len(old)
    return make_rule(
        call,
        [[i + shift if old[i] == new[i + shift] else None for i in range(len(old))]],
        [list(range(len(new)))],
        linear=[[0]],
    )


@rule(aten.repeat.default)
def repeat(call: Call) -> Rule:
    old, new, times = call.operands[0].shape, call.results[0].shape, call.args[1]
    shift = len(new) - len(old)
    inputs = [i + shift if times[i + shift] == 1 else None for i in range(len(old))]
    return make_rule(call, [inputs], [[i if times[i] == 1 else None for i in range(len(new))]], linear=[[0]])


def _window(size: int, start: int, stop: int, step: int) -> tuple[list, list, dict, list] | None:
    """Letters of `x[start:stop:step]` along a dim of `size`: an aligned block of equal blocks keeps its inner letter."""
    start, stop = min(start + size, size) if start < 0 else min(start, size), stop + size if stop < 0 else min(stop, size)
    length = stop - start
    if step == 1 and length > 0 and size % length == 0 and start % length == 0:
        return ["blocks", "window"], ["window"], {"blocks": size // length, "window": length}, ["blocks"]
    return None


def _sliced(call: Call, small_is_result: bool) -> tuple[list, list, dict, list]:
    big = (call.operands[0] if small_is_result else call.results[0]).shape
    offset = 1 if small_is_result else 2
    rank = len(big)
    dim = call.argument(offset, "dim", 0) % rank
    stop = call.argument(offset + 2, "end")
    window = _window(
        big[dim],
        call.argument(offset + 1, "start") or 0,
        big[dim] if stop is None else stop,
        call.argument(offset + 3, "step", 1),
    )
    whole: list = list(range(rank))
    part: list = list(range(rank))
    if window is None:
        whole[dim] = part[dim] = None
        return whole, part, {}, []
    whole[dim], part[dim], sizes, blocked = window
    return whole, part, sizes, blocked


@rule(aten.slice.Tensor)
def slice_(call: Call) -> Rule:
    whole, part, sizes, blocked = _sliced(call, True)
    return make_rule(call, [whole], [part], sizes=sizes, blocked=blocked, linear=[[0]])


@rule(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Rule:
    whole, part, sizes, blocked = _sliced(call, False)
    return make_rule(call, [whole, part], [whole], sizes=sizes, blocked=blocked, linear=[[0, 1]])


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def split(call: Call) -> Rule:
    shape = call.operands[0].shape
    rank = len(shape)
    position = 1 if call.target is aten.unbind.int else 2
    dim = call.argument(position, "dim", 0) % rank
    whole: list = list(range(rank))
    if call.target is aten.unbind.int:
        whole[dim] = None
        return make_rule(call, [whole], [whole[:dim] + whole[dim + 1 :]] * len(call.results), linear=[[0]])
    parts = {r.shape[dim] for r in call.results}
    part: list = list(range(rank))
    sizes: dict = {}
    if len(parts) == 1:
        sizes = {"blocks": len(call.results), "window": parts.pop()}
        whole[dim], part[dim] = ["blocks", "window"], ["window"]
    else:
        whole[dim] = part[dim] = None
    return make_rule(call, [whole], [part] * len(call.results), sizes=sizes, blocked=["blocks"], linear=[[0]])


@rule(aten.cat.default)
def cat(call: Call) -> Rule:
    out = call.results[0].shape
    rank = len(out)
    dim = call.argument(1, "dim", 0) % rank
    parts = {o.shape[dim] if len(o.shape) == rank else None for o in call.operands}
    whole: list = list(range(rank))
    part: list = list(range(rank))
    sizes: dict = {}
    if len(parts) == 1 and None not in parts:
        sizes = {"blocks": len(call.operands), "window": parts.pop()}
        whole[dim], part[dim] = ["blocks", "window"], ["window"]
    else:
        whole[dim] = part[dim] = None
    inputs = [part if len(o.shape) == rank else [None] * len(o.shape) for o in call.operands]
    return make_rule(
        call, inputs, [whole], sizes=sizes, blocked=["blocks"], linear=[list(range(len(call.operands)))]
    )


@rule(aten.stack.default)
def stack(call: Call) -> Rule:
    rank = len(call.results[0].shape)
    dim = call.argument(1, "dim", 0) % rank
    out: list = list(range(rank))
    part = out[:dim] + out[dim + 1 :]
    out[dim] = None
    return make_rule(call, [part] * len(call.operands), [out], linear=[list(range(len(call.operands)))])


@rule(aten.select.int)
def select(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dim = call.args[1] % rank
    letters: list = list(range(rank))
    letters[dim] = None
    return make_rule(call, [letters], [letters[:dim] + letters[dim + 1 :]], linear=[[0]])


@rule(aten.select_scatter.default)
def select_scatter(call: Call) -> Rule:
    rank = len(call.results[0].shape)
    dim = call.args[2] % rank
    letters: list = list(range(rank))
    letters[dim] = None
    return make_rule(call, [letters, letters[:dim] + letters[dim + 1 :]], [letters], linear=[[0, 1]])


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(call: Call) -> Rule:
    old, new = call.operands[0].shape, call.results[0].shape
    pads = list(call.args[1]) + [0] * (2 * len(new) - len(call.args[1]))
    kept = [pads[2 * (len(new) - 1 - i)] == 0 and pads[2 * (len(new) - 1 - i) + 1] == 0 for i in range(len(new))]
    letters = [i if kept[i] and old[i] == new[i] else None for i in range(len(new))]
    zero = call.argument(2, "value", 0) in (0, 0.0, None)
    return make_rule(call, [letters], [letters], linear=[[0]] if zero else ())


@rule(aten.roll.default)
def roll(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dims = call.argument(2, "dims") or list(range(rank))
    moved = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    letters = [None if d in moved else d for d in range(rank)]
    return make_rule(call, [letters], [letters], linear=[[0]])


@rule(aten.diagonal.default, aten.unfold.default)
def leading_view(call: Call) -> Rule:
    """Views that leave some dims alone; those they take apart stay whole."""
    old = call.operands[0].shape
    if call.target is aten.unfold.default:
        dim = call.args[1] % len(old)
        letters = [None if d == dim else d for d in range(len(old))]
        return make_rule(call, [letters], [[*letters, None]], linear=[[0]])
    i, j = call.argument(2, "dim1", 0) % len(old), call.argument(3, "dim2", 1) % len(old)
    letters = [None if d in (i, j) else d for d in range(len(old))]
    return make_rule(call, [letters], [[d for d in range(len(old)) if d not in (i, j)] + [None]], linear=[[0]])
