"""Mixture-of-experts products: rows sorted by expert, one matrix per expert.

The rows of an expert lie together and `offs` says where each ends, so rows and experts stay whole on an axis while
the columns of the experts' matrices split as in any matrix product.
"""
from __future__ import annotations

import torch

from passes.rules.base import Call, Rule, make_rule
from passes.rules.table import rule

aten = torch.ops.aten


@rule("transformers::grouped_mm_fallback", heavy=True)
def grouped_mm(call: Call) -> Rule | None:
    """(rows, k) @ (experts, k, n) by offsets (experts) -> (rows, n)"""
    if [len(o.shape) for o in call.operands] != [2, 3, 1]:
        return None
    return make_rule(call, [[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k", linear=[[0], [1]])


@rule("transformers::grouped_mm_fallback_backward", heavy=True)
def grouped_mm_backward(call: Call) -> Rule | None:
    """input, weight, offsets, gradient of the result -> gradients of input and weight"""
    if [len(o.shape) for o in call.operands] != [2, 3, 1, 2]:
        return None
    return make_rule(
        call, [[None, "k"], [None, "k", "n"], [None], [None, "n"]], [[None, "k"], [None, "k", "n"]],
        summed="n", linear=[[3]],
    )


if hasattr(aten, "_grouped_mm"):
    rule(aten._grouped_mm.default, heavy=True)(grouped_mm)


@rule(aten.histc.default, aten.bincount.default)
def histogram(call: Call) -> Rule:
    """A count over all elements: splitting them leaves partial counts."""
    shape = call.operands[0].shape
    letters = list(range(len(shape)))
    fixed = call.target is aten.histc.default and (call.argument(2, "min", 0), call.argument(3, "max", 0)) != (0, 0)
    return make_rule(call, [letters], [[None]], summed=letters if fixed else (), blocked=() if fixed else letters)
