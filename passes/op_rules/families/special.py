"""Sharding rules for Fourier transforms, distances, searches, histograms and masked scatter."""
# A rule is only called for its operators, so the number and types of arguments are known.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

import torch

from passes.op_rules.base import Call, Rule, aligned, make_rule
from passes.op_rules.rule_table import rule

aten = torch.ops.aten


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fft(call: Call) -> Rule:
    """Linear; the transformed dims stay whole."""
    rank = len(call.operands[0].shape)
    transformed = {d % rank for d in call.args[1]}
    letters = [None if d in transformed else d for d in range(rank)]
    return make_rule(call, [letters], [letters], linear=[[0]])


@rule(aten._cdist_forward.default, flops=lambda a, b, *_, out_val, **__: 3.0 * out_val.numel() * a.shape[-1])
def cdist(call: Call) -> Rule:
    """(…, p, m), (…, r, m) -> (…, p, r): a norm over m, so m stays whole. Batch dims are broadcast.

    Of all pairs of rows: subtract, square and add per element.
    """
    result = call.results[0].shape
    batch = list(range(len(result) - 2))
    x1, x2 = (aligned(batch, o.shape[:-2], result[:-2]) for o in call.operands)
    return make_rule(call, [[*x1, "p", None], [*x2, "r", None]], [[*batch, "p", "r"]])


@rule(aten._cdist_backward.default, flops=lambda grad, a, *_, out_val, **__: 3.0 * grad.numel() * a.shape[-1])
def cdist_backward(call: Call) -> Rule | None:
    """gradient (…, p, r), x1 (…, p, m), x2 (…, r, m), distances (…, p, r) -> gradient of x1"""
    batch = list(range(len(call.results[0].shape) - 2))
    x1, x2, pairs = [*batch, "p", "m"], [*batch, "r", "m"], [*batch, "p", "r"]
    if any(len(o.shape) != len(x1) or o.shape[:-2] != call.results[0].shape[:-2] for o in call.operands):
        return None  # broadcast operands were expanded before
    return make_rule(call, [pairs, x1, x2, pairs], [x1], summed=["r"], linear=[[0]])


@rule(aten.bucketize.Tensor)
def bucketize(call: Call) -> Rule:
    dims = range(len(call.results[0].shape))
    return make_rule(call, [dims, [None]], [dims])


@rule(aten.searchsorted.Tensor)
def searchsorted(call: Call) -> Rule | None:
    """sorted sequence (…, n), values (…, v) -> (…, v); a sequence with one dim is shared by all values"""
    if len(call.operands) > 2:  # an explicit sorter
        return None
    sequence, values = call.operands[0].shape, call.operands[1].shape
    dims = list(range(len(values)))
    own = [None] if len(sequence) == 1 else [*dims[:-1], None]
    return make_rule(call, [own, dims], [dims])


@rule(aten.histc.default)
def histogram(call: Call) -> Rule:
    """Counts over all elements: partial sums if these are sharded, which needs fixed bins."""
    letters = range(len(call.operands[0].shape))
    fixed = (call.argument(2, "min", 0), call.argument(3, "max", 0)) != (0, 0)
    return make_rule(call, [letters], [[None]], summed=letters if fixed else (), blocked=() if fixed else letters)


@rule(aten.masked_scatter.default, aten.masked_scatter_backward.default)
def masked_scatter(call: Call) -> Rule:
    """The n-th masked element takes the n-th of the source, which depends on the whole mask: all dims stay whole."""
    whole = [[[None] * len(s.shape) for s in specs] for specs in (call.operands, call.results)]
    return make_rule(call, *whole, linear=[[0, 2]] if call.target is aten.masked_scatter.default else [[0]])
