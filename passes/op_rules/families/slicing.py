"""Sharding rules for slice, split, cat, stack, select, pad and glu.

A dim that is cut at multiples of a window is factored into blocks and a window letter: the window can be sharded inside
each part. Local sizes and bounds are then the global ones divided by the number of shards.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Letter, Rule, make_rule
from passes.op_rules.local_call import Insert, LocalCall
from passes.op_rules.rule_table import rule

aten = torch.ops.aten
rule("aten::chunk", "aten::narrow", "aten::narrow.Tensor", "aten::split.sizes", operator.getitem, view="part")
MAX_BLOCKS = 64
"""Most windows per dim. Smaller windows get no letter: sharding inside them would separate neighbors for little gain."""


class SlicedDim:
    """Letters of a dim of `size` that is cut into `parts` (not necessarily all of it), and of each part."""

    def __init__(self, size: int, parts: Sequence[int], boundaries: Sequence[int] = ()):
        window = math.gcd(size, *parts, *boundaries)
        self.sizes: dict[Letter, int] = {}
        self.blocked: list[Letter] = []
        if window <= 1 or size // window > MAX_BLOCKS:
            self.whole: list | None = None
            self.parts: list[list | None] = [None] * len(parts)
            return
        self.sizes = {"window": window, "blocks": size // window}
        for k, part in enumerate(parts):
            self.sizes["blocks", k] = part // window
        self.blocked = [letter for letter in self.sizes if letter != "window"]
        self.whole = ["blocks", "window"]
        self.parts = [[("blocks", k), "window"] if part else None for k, part in enumerate(parts)]


def _at(rank: int, dim: int, entry: list | None) -> list:
    """Letters of a tensor: one per dim, and `entry` at `dim`."""
    letters: list = list(range(rank))
    letters[dim] = entry
    return letters


def _sliced(call: Call, big: tuple[int, ...], position: int) -> tuple[list, list, dict, list]:
    """Letters of the whole and of the slice, sizes, blocked letters. position: of `dim` among the arguments."""
    rank = len(big)
    dim = call.argument(position, "dim", 0) % rank
    bounds = (
        call.argument(position + 1, "start"), call.argument(position + 2, "end"), call.argument(position + 3, "step", 1)
    )
    if not all(bound is None or isinstance(bound, int) for bound in bounds):  # bounds that change from call to call
        return _at(rank, dim, None), _at(rank, dim, None), {}, []
    start, stop, step = slice(*bounds).indices(big[dim])
    length = len(range(start, stop, step))
    if step > 1 and big[dim] % step == 0 and start < step and length == big[dim] // step:
        # Every step-th element: the dim is `length` groups of `step` elements, one of which is taken.
        sizes: dict[Letter, int] = {"window": length, "step": step}
        return _at(rank, dim, ["window", "step"]), _at(rank, dim, ["window"]), sizes, ["step"]
    if step > 1:
        return _at(rank, dim, None), _at(rank, dim, None), {}, []
    cut = SlicedDim(big[dim], [length], [start])
    return _at(rank, dim, cut.whole), _at(rank, dim, cut.parts[0]), cut.sizes, cut.blocked


def _local_window(first: int) -> Callable[[LocalCall, Insert], Node]:
    """Local call of slice and slice_scatter; `first` is the position of dim among the arguments."""
    def local(call: LocalCall, insert: Insert) -> Node:
        dim = call.argument(first, "dim", 0) % len(call.global_shapes[0])
        if not call.is_split(dim):
            return call.unchanged(insert)
        size = int(call.args[0].meta["val"].shape[dim])
        step = call.argument(first + 3, "step", 1)
        start, stop, _ = slice(call.argument(first + 1, "start"), call.argument(first + 2, "end"), step).indices(
            size * call.global_shapes[0][dim] // call.local_shapes[0][dim])
        # Of every `step` elements one: the same one. Of a run of blocks: the same blocks, each a part of the whole one.
        bounds = (start, size) if step > 1 else (call.local(start, dim), call.local(stop, dim))
        return insert(call.target, *call.args[:first], dim, *bounds, step)

    return local


@rule(aten.slice.Tensor, view="part", local=_local_window(1))
def slice_(call: Call) -> Rule:
    """args: self, dim, start, end, step"""
    whole, part, sizes, blocked = _sliced(call, call.operands[0].shape, 1)
    return make_rule(call, [whole], [part], sizes=sizes, blocked=blocked, linear=[[0]])


@rule(aten.slice_scatter.default, fusion="inlined", local=_local_window(2))
def slice_scatter(call: Call) -> Rule:
    """args: self, source, dim, start, end, step"""
    whole, part, sizes, blocked = _sliced(call, call.results[0].shape, 2)
    return make_rule(call, [whole, part], [whole], sizes=sizes, blocked=blocked, linear=[[0, 1]])


def _local_split(call: LocalCall, insert: Insert) -> Node:
    dim = call.argument(2, "dim", 0) % len(call.global_shapes[0])
    sizes = call.args[1]
    return insert(call.target, call.args[0], call.local(sizes, dim) if isinstance(sizes, int) else [
        call.local(size, dim) for size in sizes], dim)


@rule(aten.split.Tensor, aten.split_with_sizes.default, view="part", local=_local_split)
def split(call: Call) -> Rule:
    """args: self, size or sizes, dim"""
    shape = call.operands[0].shape
    dim = call.argument(2, "dim", 0) % len(shape)
    cut = SlicedDim(shape[dim], [r.shape[dim] for r in call.results])
    return make_rule(
        call, [_at(len(shape), dim, cut.whole)], [_at(len(shape), dim, part) for part in cut.parts],
        sizes=cut.sizes, blocked=cut.blocked, linear=[[0]],
    )


@rule(aten.cat.default, fusion="fuses")
def cat(call: Call) -> Rule:
    """args: tensors, dim; empty tensors with one dim are ignored, whatever the rank of the others"""
    out = call.results[0].shape
    rank = len(out)
    dim = call.argument(1, "dim", 0) % rank
    cut = SlicedDim(out[dim], [o.shape[dim] if len(o.shape) == rank else 0 for o in call.operands])
    inputs = [
        _at(rank, dim, part) if len(o.shape) == rank else [None] for o, part in zip(call.operands, cut.parts)
    ]
    return make_rule(
        call, inputs, [_at(rank, dim, cut.whole)], sizes=cut.sizes, blocked=cut.blocked,
        linear=[list(range(len(call.operands)))],
    )


@rule(aten.unbind.int, view="part")
def unbind(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dim = call.argument(1, "dim", 0) % rank
    part = [d for d in range(rank) if d != dim]
    return make_rule(call, [_at(rank, dim, None)], [part] * len(call.results), linear=[[0]])


@rule(aten.stack.default)
def stack(call: Call) -> Rule:
    rank = len(call.results[0].shape)
    dim = call.argument(1, "dim", 0) % rank
    part = [d for d in range(rank) if d != dim]
    return make_rule(
        call, [part] * len(call.operands), [_at(rank, dim, None)], linear=[list(range(len(call.operands)))]
    )


@rule(aten.select.int, view="part")
def select(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dim = call.args[1] % rank
    letters: list = list(range(rank))
    letters[dim] = None
    return make_rule(call, [letters], [letters[:dim] + letters[dim + 1 :]], linear=[[0]])


@rule(aten.select_scatter.default, fusion="inlined")
def select_scatter(call: Call) -> Rule:
    rank = len(call.results[0].shape)
    dim = call.args[2] % rank
    letters: list = list(range(rank))
    letters[dim] = None
    return make_rule(call, [letters, letters[:dim] + letters[dim + 1 :]], [letters], linear=[[0, 1]])


@rule(aten.constant_pad_nd.default, fusion="inlined")
def constant_pad_nd(call: Call) -> Rule:
    old, new = call.operands[0].shape, call.results[0].shape
    pads = list(call.args[1]) + [0] * (2 * len(new) - len(call.args[1]))
    kept = [pads[2 * (len(new) - 1 - i)] == 0 and pads[2 * (len(new) - 1 - i) + 1] == 0 for i in range(len(new))]
    letters = [i if kept[i] and old[i] == new[i] else None for i in range(len(new))]
    zero = call.argument(2, "value", 0) in (0, 0.0, None)
    return make_rule(call, [letters], [letters], linear=[[0]] if zero else ())


@rule(aten.glu.default)
def glu(call: Call) -> Rule:
    """The first half of a dim times the sigmoid of the second: both halves are sharded in the same way."""
    rank = len(call.operands[0].shape)
    dim = call.argument(1, "dim", -1) % rank
    cut = SlicedDim(call.operands[0].shape[dim], [call.results[0].shape[dim]])
    return make_rule(
        call, [_at(rank, dim, cut.whole)], [_at(rank, dim, cut.parts[0])], sizes=cut.sizes, blocked=cut.blocked
    )


@rule(aten.glu_backward.default)
def glu_backward(call: Call) -> Rule:
    """args: gradient, self, dim"""
    rank = len(call.results[0].shape)
    dim = call.args[2] % rank
    cut = SlicedDim(call.results[0].shape[dim], [call.operands[0].shape[dim]])
    half, whole = _at(rank, dim, cut.parts[0]), _at(rank, dim, cut.whole)
    return make_rule(call, [half, whole], [whole], sizes=cut.sizes, blocked=cut.blocked, linear=[[0]])
