"""Operators that make a tensor from numbers. A constant may be made split; zero is also a partial sum of zeros."""
from __future__ import annotations

import torch

from passes.rules.base import Call, Rule, make_rule
from passes.rules.table import rule

aten, prims = torch.ops.aten, torch.ops.prims


def _constant(call: Call, value: object) -> Rule:
    zero = isinstance(value, (int, float, bool)) and value == 0
    shape = call.results[0].shape
    # `linear` in no operand at all: f() = 0 is the sum over ranks of f().
    return make_rule(
        call, [[None] * len(o.shape) for o in call.operands], [list(range(len(shape)))], linear=[[]] if zero else ()
    )


@rule(aten.full.default)
def full(call: Call) -> Rule:
    return _constant(call, call.args[1])


@rule(aten.full_like.default, aten.new_full.default)
def full_like(call: Call) -> Rule:
    shape = call.results[0].shape
    if call.operands[0].shape == shape and call.target is aten.full_like.default:
        zero = call.args[1] == 0
        letters = list(range(len(shape)))
        return make_rule(call, [letters], [letters], linear=[[0]] if zero else ())
    return _constant(call, call.args[-1])


@rule(aten.zeros_like.default)
def zeros_like(call: Call) -> Rule:
    letters = list(range(len(call.results[0].shape)))
    return make_rule(call, [letters], [letters], linear=[[0]])


@rule(aten.ones_like.default, aten.empty_like.default)
def ones_like(call: Call) -> Rule:
    letters = list(range(len(call.results[0].shape)))
    return make_rule(call, [letters], [letters])


@rule(aten.scalar_tensor.default)
def scalar_tensor(call: Call) -> Rule:
    return _constant(call, call.args[0])


@rule(aten.empty.memory_format, aten.zeros.default, aten.ones.default)
def empty(call: Call) -> Rule:
    return _constant(call, 0 if call.target is aten.zeros.default else 1)
