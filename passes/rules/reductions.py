"""Reductions, scans, sorting: sums stay Partial, maxima PartialMax, everything else keeps its dim whole."""
from __future__ import annotations

import torch

from passes.rules.base import Call, Rule, make_rule
from passes.rules.table import rule

aten, prims = torch.ops.aten, torch.ops.prims


def _dims(call: Call, rank: int) -> set[int]:
    given = call.argument(1, "dim")
    if given is None or given == []:
        return set(range(rank))
    return {d % rank for d in ([given] if isinstance(given, int) else given)} if rank else set()


def _reduction(call: Call, **kinds) -> Rule:
    rank = len(call.operands[0].shape)
    dims = _dims(call, rank)
    letters: list[int | None] = list(range(rank))
    keep = len(call.results[0].shape) == rank and rank > 0
    out = [None if d in dims else d for d in range(rank)] if keep else [d for d in range(rank) if d not in dims]
    reduced = sorted(dims)
    return make_rule(
        call,
        [letters],
        [out] * len(call.results),
        summed=reduced if "summed" in kinds else (),
        maxed=reduced if "maxed" in kinds else (),
        blocked=() if kinds else reduced,
        linear=[[0]] if "summed" in kinds else (),
    )


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(call: Call) -> Rule:
    if "float" not in call.results[0].dtype and call.operands[0].dtype == "bool":
        return _reduction(call, summed=True)
    return _reduction(call, summed=True)


@rule(aten.amax.default)
def maximum(call: Call) -> Rule:
    return _reduction(call, maxed=True)


@rule(
    aten.amin.default, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.prod.default,
    aten.mean.default, aten.mean.dim, aten.var.correction, aten.var_mean.correction, aten.argmax.default,
    aten.argmin.default, aten.logsumexp.default, aten.linalg_vector_norm.default,
)
def whole_reduction(call: Call) -> Rule:
    """The reduced dims stay whole; `mean` and `var_mean` are rewritten into sums before planning."""
    if call.target is aten.linalg_vector_norm.default:
        dims = call.argument(2, "dim")
        call = Call(call.target, (call.args[0], dims), {}, call.operands, call.results)
    return _reduction(call)


def _along(call: Call, position: int, default: int, linear: bool = False) -> Rule:
    """Same shape in and out, one dim whole."""
    rank = len(call.operands[0].shape)
    letters: list[int | None] = list(range(rank))
    if rank:
        letters[call.argument(position, "dim", default) % rank] = None
    return make_rule(
        call,
        [letters] * len(call.operands),
        [letters if len(r.shape) == rank else [None] * len(r.shape) for r in call.results],
        linear=[[0]] if linear else (),
    )


@rule(aten.cumsum.default)
def cumsum(call: Call) -> Rule:
    return _along(call, 1, 0, linear=True)


@rule(aten.sort.default, aten._softmax.default, aten._log_softmax.default, aten.cumprod.default)
def along_second(call: Call) -> Rule:
    return _along(call, 1, -1)


@rule(aten.sort.stable)
def sort_stable(call: Call) -> Rule:
    return _along(call, 2, -1)


@rule(aten.topk.default)
def topk(call: Call) -> Rule:
    return _along(call, 2, -1)


@rule(aten.flip.default)
def flip(call: Call) -> Rule:
    rank = len(call.operands[0].shape)
    dims = {d % rank for d in call.args[1]}
    letters = [None if d in dims else d for d in range(rank)]
    return make_rule(call, [letters], [letters], linear=[[0]])
