"""Sharding rules for tensor creation. Constants can be created sharded; zeros are also a partial sum of zeros.

Positions (`iota`) can be sharded where the rewrite knows each rank's start. Random numbers are those that one device would
draw: where they are computed from their positions (`random_at`), each rank computes its part; others are drawn whole on every
rank.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.local_call import Insert, LocalCall
from passes.op_rules.rule_table import rule

aten, prims = torch.ops.aten, torch.ops.prims
rule(aten.full.default, aten.empty.memory_format, aten.zeros.default, aten.ones.default, sizes=0)
rule(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, sizes=1)
rule(aten.zeros_like.default, aten.new_zeros.default, aten.ones_like.default, aten.new_ones.default, fusion="inlined")
rule(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default, flops=0)
SAME_SHAPE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default)


def _constant(call: Call, value: object) -> Rule:
    zero = isinstance(value, (int, float, bool)) and value == 0
    dims = range(len(call.results[0].shape))
    if call.target in SAME_SHAPE:
        # Only the shape of the operand is read, so zeros are the sum of zeros for any values.
        return make_rule(call, [dims], [dims], linear=[[0], []] if zero else ())
    # `linear` with an empty group: f() = 0 is the sum over ranks of f().
    return make_rule(call, [[None] * len(o.shape) for o in call.operands], [dims], linear=[[]] if zero else ())


@rule(aten.full.default, aten.full_like.default, fusion="inlined")
def full(call: Call) -> Rule:
    return _constant(call, call.args[1])


@rule(aten.new_full.default, fusion="inlined")
def new_full(call: Call) -> Rule:
    return _constant(call, call.args[2])


@rule(aten.scalar_tensor.default, fusion="inlined")
def scalar_tensor(call: Call) -> Rule:
    return _constant(call, call.args[0])


@rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(call: Call) -> Rule:
    return _constant(call, 0)


@rule(
    aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.empty.memory_format, aten.empty_like.default,
    aten.new_empty.default, aten.empty_strided.default, aten.new_empty_strided.default,
)
def others(call: Call) -> Rule:
    return _constant(call, None)


def _local_iota(call: LocalCall, insert: Insert) -> Node:
    """args: length; start, step, …"""
    if not call.ordered:
        return call.unchanged(insert)
    own, start, step = call.ordered[0], call.kwargs["start"], call.kwargs["step"]
    if call.at_run_time:
        return _from_asked(call, insert, insert(call.target, own.count, **call.kwargs), step)
    return own.marked(insert(call.target, own.count, **{**call.kwargs, "start": start + own.first * step}))


def _from_asked(call: LocalCall, insert: Insert, positions: Node, step: int) -> Node:
    """Shift positions of the first rank to this rank's."""
    begin = call.ordered[0].asked(insert, positions.meta["val"].device)
    if isinstance(begin, int):
        return insert(aten.add.Tensor, positions, begin * step) if begin else positions
    return insert(aten.add.Tensor, positions, begin if step == 1 else insert(aten.mul.Tensor, begin, step))


def _local_arange(call: LocalCall, insert: Insert) -> Node:
    """args: (end), (start, end) or (start, end, step); the result's type follows from theirs."""
    if not call.ordered:
        return call.unchanged(insert)
    own = call.ordered[0]
    number = int if all(isinstance(x, int) for x in call.args) else float
    start = number(call.args[0] if len(call.args) > 1 else 0)
    step = number(call.args[2] if len(call.args) > 2 else 1)
    exact = call.kwargs.get("dtype") in (None, torch.int64)  # others would be rounded otherwise
    if call.at_run_time and number is int and exact:
        positions = insert(aten.arange.start_step, start, start + own.count * step, step, **call.kwargs)
        return _from_asked(call, insert, positions, int(step))
    # Half a step before the next position: rounding must not make one more or one less.
    end = start + (own.first + own.count) * step - (0 if number is int else step / 2)
    return own.marked(insert(aten.arange.start_step, start + own.first * step, end, step, **call.kwargs))


def _local_strided(position: int) -> Callable[[LocalCall, Insert], Node]:
    """args from `position`: size, stride. The local tensor is packed in the whole one's order of dims."""
    def local(call: LocalCall, insert: Insert) -> Node:
        strides = list(call.args[position + 1])
        if call.local_shapes != call.global_shapes:
            step = 1
            for d in sorted(range(len(strides)), key=lambda d: strides[d]):
                strides[d], step = step, step * max(call.local_shapes[0][d], 1)
        return insert(call.target, *call.args[:position], list(call.local_shapes[0]), strides, **call.kwargs)

    return local


rule(aten.empty_strided.default, local=_local_strided(0))
rule(aten.new_empty_strided.default, local=_local_strided(1))
rule(prims.iota.default, local=_local_iota)
rule(aten.arange.default, aten.arange.start, aten.arange.start_step, local=_local_arange)


@rule(prims.iota.default, aten.arange.default, aten.arange.start, aten.arange.start_step, fusion="inlined")
def positions(call: Call) -> Rule:
    return make_rule(call, [], ["p"], ordered="p")


rule("prims::inductor_random", "hpml::random_at", fusion="fuses")
rule("hpml::positions", fusion="inlined")


@rule("hpml::random_at")
def random_at(call: Call) -> Rule:
    """seed; positions along each dim. These stay whole, of which a slice is free: they are small."""
    dims = range(len(call.results[0].shape))
    return make_rule(call, [[], *([d] for d in dims)], [dims])


@rule(
    "random", "hpml::positions", "prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_lookup_seed",
    "prims::inductor_random", "prims::inductor_randint",
)
def drawn(call: Call) -> Rule:
    """Rule without letters: whole on every rank."""
    return make_rule(call, *([[None] * len(s.shape) for s in specs] for specs in (call.operands, call.results)))
