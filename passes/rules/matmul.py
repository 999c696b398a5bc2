"""Matrix products: mm, bmm and their fused forms."""
from __future__ import annotations

import torch

from passes.rules.base import Call, Rule, make_rule
from passes.rules.table import rule

aten = torch.ops.aten


@rule(aten.mm.default, heavy=True)
def mm(call: Call) -> Rule:
    return make_rule(call, ["mk", "kn"], ["mn"], summed="k", linear=[[0], [1]])


@rule(aten.bmm.default, heavy=True)
def bmm(call: Call) -> Rule:
    return make_rule(call, ["bmk", "bkn"], ["bmn"], summed="k", linear=[[0], [1]])


@rule(aten.addmm.default, heavy=True)
def addmm(call: Call) -> Rule:
    bias = call.operands[0].shape
    wide = len(bias) == 2 and bias[0] > 1
    letters = ["n" if bias[-1] > 1 else None] if len(bias) == 1 else ["m" if wide else None, "n" if bias[1] > 1 else None]
    return make_rule(call, [letters, "mk", "kn"], ["mn"], summed="k", linear=[[0, 1], [0, 2]], addends=[0])


@rule(aten.baddbmm.default, heavy=True)
def baddbmm(call: Call) -> Rule:
    bias, out = call.operands[0].shape, call.results[0].shape
    letters = [x if size == whole else None for x, size, whole in zip("bmn", bias, out)]
    return make_rule(call, [letters, "bmk", "bkn"], ["bmn"], summed="k", linear=[[0, 1], [0, 2]], addends=[0])
