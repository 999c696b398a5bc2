"""Sharding rules for reductions, scans and sorting: sums become Partial, maxima PartialMax, others need the dim whole."""
from __future__ import annotations

from typing import Any

import torch

from passes.compat import pytree
from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.rule_table import rule

aten, prims = torch.ops.aten, torch.ops.prims


def _largest(*args: Any, out_val: Any, **kwargs: Any) -> float:
    """FLOPs: one per element of the largest operand, or of the results."""
    given = [x.numel() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return float(max([sum(x.numel() for x in pytree.tree_leaves(out_val)), *given]))


rule("reduction", "aten::logsumexp", "aten::std_mean.correction", flops=_largest)  # some releases of torch have no such tag
rule(*(f"aten::{name}" for name in (
    "sum", "sum.dim_IntList", "mean", "mean.dim", "prod", "prod.dim_int", "any", "any.dim", "any.dims", "all", "all.dim",
    "all.dims", "amax", "amin", "argmax", "argmin", "max", "max.dim", "min", "min.dim", "var.correction", "var_mean.correction",
    "std.correction")), flops=_largest, fusion="fuses")
rule(aten.cumsum.default, aten._softmax.default, aten._log_softmax.default, fusion="fuses")
rule(aten.flip.default, fusion="inlined")


def _dims(given: int | list[int] | None, rank: int) -> set[int]:
    """Set of reduced dims; None or an empty list means all."""
    if given is None or given == []:
        return set(range(rank))
    return {d % rank for d in ([given] if isinstance(given, int) else given)} if rank else set()


def _reduction(call: Call, position: int = 1, *, default: int | None = None, summed: bool = False, maxed: bool = False) -> Rule:
    """Rule of a reduction. position: of the argument `dim`. default: its default value; None means all dims."""
    rank = len(call.operands[0].shape)
    dims = _dims(call.argument(position, "dim", default), rank)
    keep = len(call.results[0].shape) == rank and rank > 0
    out = [None if d in dims else d for d in range(rank)] if keep else [d for d in range(rank) if d not in dims]
    reduced = sorted(dims)
    return make_rule(
        call,
        [range(rank)],
        [out] * len(call.results),
        summed=reduced if summed else (),
        maxed=reduced if maxed else (),
        blocked=() if summed or maxed else reduced,
        linear=[[0]] if summed else (),
    )


@rule(aten.sum.default)
def total(call: Call) -> Rule:
    return _reduction(Call(call.target, call.args[:1], {}, call.operands, call.results), summed=True)


@rule(aten.sum.dim_IntList)
def sum_(call: Call) -> Rule:
    return _reduction(call, summed=True)


@rule(aten.amax.default, aten.max.default, aten.any.default, aten.any.dim, aten.any.dims)
def maximum(call: Call) -> Rule:
    """Maxima; `any` is the maximum of bools."""
    return _reduction(call, maxed=True)


@rule(
    aten.amin.default, aten.min.default, aten.all.default, aten.all.dim, aten.all.dims, aten.prod.default,
    aten.prod.dim_int, aten.mean.default, aten.mean.dim, aten.var.correction, aten.var_mean.correction,
    aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim,
    aten.median.default, aten.nanmedian.default, aten.logsumexp.default, aten.aminmax.default,
)
def whole_reduction(call: Call) -> Rule:
    """Reductions whose dims stay whole; `mean` and `var_mean` are rewritten into sums before planning."""
    return _reduction(call)


@rule(aten.linalg_vector_norm.default)
def vector_norm(call: Call) -> Rule:
    """args: self, order of the norm, dims; the reduced dims stay whole"""
    return _reduction(call, 2)


@rule(aten.kthvalue.default)
def kthvalue(call: Call) -> Rule:
    """args: self, k, dim (default: the last)"""
    return _reduction(call, 2, default=-1)


@rule(aten.mode.default)
def mode(call: Call) -> Rule:
    """args: self, dim (default: the last)"""
    return _reduction(call, default=-1)


def _along(call: Call, position: int, default: int, linear: bool = False) -> Rule:
    """Rule of operators with equal shapes of operands and results, in which one dim stays whole."""
    rank = len(call.operands[0].shape)
    letters: list[int | None] = list(range(rank))
    if rank:
        letters[call.argument(position, "dim", default) % rank] = None
    return make_rule(call, [letters] * len(call.operands), [letters] * len(call.results), linear=[[0]] if linear else ())


@rule(aten.cumsum.default)
def cumsum(call: Call) -> Rule:
    return _along(call, 1, 0, linear=True)


@rule(
    aten.sort.default, aten._softmax.default, aten._log_softmax.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.cummax.default, aten.cummin.default,
)
def along_second(call: Call) -> Rule:
    return _along(call, 1, -1)


@rule(aten.sort.stable, aten.topk.default)
def along_third(call: Call) -> Rule:
    return _along(call, 2, -1)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: Call) -> Rule:
    """args: gradient, result, dim, dtype"""
    return _along(call, 2, -1, linear=True)


@rule(aten.flip.default, prims.rev.default)
def flip(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dims = {d % rank for d in call.args[1]}
    letters = [None if d in dims else d for d in range(rank)]
    return make_rule(call, [letters], [letters], linear=[[0]])
