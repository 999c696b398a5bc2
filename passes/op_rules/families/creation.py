"""Sharding rules for tensor creation. Constants can be created sharded; zeros are also a partial sum of zeros.

Positions (`iota`) can be sharded where the rewrite knows each rank's start. Random numbers are drawn whole on every rank,
so that each rank uses its part of the numbers that one device would draw.
"""
from __future__ import annotations

import torch

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.rule_table import rule

aten, prims = torch.ops.aten, torch.ops.prims
SAME_SHAPE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default)


def _constant(call: Call, value: object) -> Rule:
    zero = isinstance(value, (int, float, bool)) and value == 0
    dims = range(len(call.results[0].shape))
    if call.target in SAME_SHAPE:
        # Only the shape of the operand is read, so zeros are the sum of zeros for any values.
        return make_rule(call, [dims], [dims], linear=[[0], []] if zero else ())
    # `linear` with an empty group: f() = 0 is the sum over ranks of f().
    return make_rule(call, [[None] * len(o.shape) for o in call.operands], [dims], linear=[[]] if zero else ())


@rule(aten.full.default, aten.full_like.default)
def full(call: Call) -> Rule:
    return _constant(call, call.args[1])


@rule(aten.new_full.default)
def new_full(call: Call) -> Rule:
    return _constant(call, call.args[2])


@rule(aten.scalar_tensor.default)
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


@rule(prims.iota.default, aten.arange.default, aten.arange.start, aten.arange.start_step)
def positions(call: Call) -> Rule:
    return make_rule(call, [], ["p"], ordered="p")


@rule(
    "random", "prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_lookup_seed", "prims::inductor_random",
    "prims::inductor_randint",
)
def drawn(call: Call) -> Rule:
    """Rule without letters: whole on every rank."""
    return make_rule(call, *([[None] * len(s.shape) for s in specs] for specs in (call.operands, call.results)))
