"""Sharding rules for matmuls: mm, bmm, their fused forms, and products with vectors."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from passes.op_rules.base import Call, Rule, aligned, make_rule
from passes.op_rules.rule_table import rule

aten = torch.ops.aten
FEATURES = {"k": "features", "n": "features"}


def contraction(left: int) -> Callable[..., float]:
    """FLOPs of operators whose results are sums over the last dim of operand `left`."""
    return lambda *args, out_val, **kwargs: 2.0 * out_val.numel() * args[left].shape[-1]


rule("aten::linear", "aten::matmul", "aten::vdot", flops=contraction(0))
rule("aten::addmv", "aten::_addmm_activation", flops=contraction(1))


@rule(aten.mm.default, heavy="matmul")
def mm(call: Call) -> Rule:
    return make_rule(call, ["mk", "kn"], ["mn"], summed="k", linear=[[0], [1]], roles=FEATURES)


@rule(aten.bmm.default, heavy="matmul")
def bmm(call: Call) -> Rule:
    return make_rule(call, ["bmk", "bkn"], ["bmn"], summed="k", linear=[[0], [1]], roles={"b": "matrices"})


def _with_bias(call: Call, a: str, b: str, out: str) -> Rule:
    bias = aligned(out, call.operands[0].shape, call.results[0].shape)
    return make_rule(call, [bias, a, b], [out], summed="k", linear=[[0, 1], [0, 2]], addends=[0],
                     roles={"b": "matrices"} if "b" in out else FEATURES)


@rule(aten.addmm.default, heavy="matmul")
def addmm(call: Call) -> Rule:
    return _with_bias(call, "mk", "kn", "mn")


@rule(aten.baddbmm.default, heavy="matmul")
def baddbmm(call: Call) -> Rule:
    return _with_bias(call, "bmk", "bkn", "bmn")


@rule(aten.mv.default, flops=contraction(0))
def mv(call: Call) -> Rule:
    return make_rule(call, ["mk", "k"], ["m"], summed="k", linear=[[0], [1]])


@rule(aten.dot.default, flops=contraction(0))
def dot(call: Call) -> Rule:
    return make_rule(call, ["k", "k"], [""], summed="k", linear=[[0], [1]])


def _trilinear_flops(*args: Any, out_val: Any, **kwargs: Any) -> float:
    """Three operands, each unsqueezed at its dims and then broadcast: two products and a sum per element of all dims."""
    shapes = []
    for operand, new_dims in zip(args[:3], args[3:6], strict=True):
        shape = list(operand.shape)
        for dim in sorted(new_dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3.0 * math.prod(max(sizes) for sizes in zip(*shapes, strict=True))


@rule(aten._trilinear.default, flops=_trilinear_flops)
def trilinear(call: Call) -> Rule:
    """args: three operands, the dims along which each is expanded, the dims over which the product is summed, …

    All dims are dims of the product of the three operands before the sum.
    """
    expanded, summed = call.args[3:6], set(call.args[6])
    rank = len(call.operands[0].shape) + len(expanded[0])
    inputs = [[d for d in range(rank) if d not in own] for own in expanded]
    # An operand of size 1 in a dim is broadcast along it.
    sizes: dict[int, int] = {}
    for letters, spec in zip(inputs, call.operands):
        for d, size in zip(letters, spec.shape):
            sizes[d] = max(size, sizes.get(d, 1))
    inputs = [[d if size == sizes[d] else None for d, size in zip(own, s.shape)] for own, s in zip(inputs, call.operands)]
    return make_rule(
        call, inputs, [[d for d in range(rank) if d not in summed]], summed=sorted(summed), linear=[[0], [1], [2]]
    )
