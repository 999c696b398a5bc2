"""Sharding rules for mixture-of-experts matmuls: rows sorted by expert, one matrix per expert.

The rows of an expert are contiguous and `offs` has their ends, so rows and experts stay whole; the columns and the inner
dim of the experts' matrices can be sharded as in any matmul.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.families.matmul import FEATURES
from passes.op_rules.rule_table import rule

aten = torch.ops.aten
ALIGNMENT_BYTES = 16
"""The kernel needs rows that start at multiples of this."""


def grouped_mm_flops(rows: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> float:
    """2-D rows belong to one group each, whether the groups split m (weight is 3-D) or k (both are 2-D)."""
    if rows.dim() == 3 and weight.dim() == 2:  # groups split n: (g)(m)(k), (k)(n)
        return 2.0 * math.prod(rows.shape[1:]) * weight.shape[-1]
    return 2.0 * math.prod(rows.shape) * weight.shape[-1]


def grouped_mm_backward_flops(rows: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> float:
    return 2 * grouped_mm_flops(rows, weight, out_val=None)


rule("aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2", flops=grouped_mm_flops)


@rule("transformers::grouped_mm_fallback", heavy="matmul", flops=grouped_mm_flops)
def grouped_mm_fallback(call: Call) -> Rule:
    """(rows, k) @ (experts, k, n) by offsets (experts) -> (rows, n)"""
    return make_rule(
        call, [[None, "k"], [None, "k", "n"], [None]], [[None, "n"]], summed="k", linear=[[0], [1]], roles=FEATURES)


@rule("transformers::grouped_mm_fallback_backward", heavy="matmul", flops=grouped_mm_backward_flops)
def grouped_mm_fallback_backward(call: Call) -> Rule:
    """input, weight, offsets, gradient of the result -> gradients of input and weight"""
    return make_rule(
        call, [[None, "k"], [None, "k", "n"], [None], [None, "n"]], [[None, "k"], [None, "k", "n"]],
        summed="n", linear=[[3]],
    )


def _matrices_packed(value: torch.Tensor) -> bool:
    """True if rows or columns are contiguous and aligned."""
    if value.dim() < 2:
        return True
    unit = ALIGNMENT_BYTES // value.element_size()
    (rows, columns), (by_row, by_column) = value.shape[-2:], value.stride()[-2:]
    return (by_column == 1 and by_row >= columns and by_row % unit == 0) or (
        by_row == 1 and by_column >= rows and by_column % unit == 0
    )


@rule("aten::_grouped_mm", heavy="matmul", flops=grouped_mm_flops, layout=_matrices_packed)
def grouped_mm(call: Call) -> Rule:
    """One matrix per group. Groups are runs of rows of the first operand, of columns of the second, of the summed dim of
    both (gradients of the matrices), or, without offsets, the first dim of both.

    Shards must be multiples of the kernel's alignment: the letter "run" is one such multiple and is not sharded.
    """
    a, b = call.operands[0].shape, call.operands[1].shape
    unit = ALIGNMENT_BYTES // call.operands[0].itemsize
    sizes: dict[str, int] = {"run": unit}

    def split(letter: str, size: int) -> list[str] | None:
        sizes[letter] = size // unit
        return [letter, "run"] if size % unit == 0 else None

    m, k, n = split("m", a[-2]), split("k", a[-1]), split("n", b[-1])
    ends = [[None]] * (len(call.operands) - 2)
    if len(a) == len(b) == 3:
        operands, result = [["g", m, k], ["g", k, n]], ["g", m, n]
    elif len(b) == 3:
        operands, result = [[None, k], [None, k, n]], [None, n]
    elif len(a) == 3:
        operands, result = [[None, m, k], [k, None]], [m, None]
    else:
        operands, result = [[m, None], [None, n]], [None, m, n]
    return make_rule(
        call, [*operands, *ends], [result], sizes=sizes, summed="k" if len(a) + len(b) > 4 else (), blocked=["run"],
        linear=[[0], [1]], roles={**FEATURES, "g": "experts"},
    )
