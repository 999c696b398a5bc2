"""Sharding rules for 8-bit matmuls and fake quantization."""
# A rule is only called for its operators, so the number and types of arguments are known.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

from torch.fx import Node

from passes.op_rules.base import Call, Operand, Rule, make_rule
from passes.op_rules.families.matmul import contraction
from passes.op_rules.local_call import Insert, LocalCall, column_major, packed_copy
from passes.op_rules.rule_table import rule
from passes.op_rules.sum_dtypes import ROUNDED

ALIGNMENT_BYTES = 16
"""GPU kernels need rows and columns that are multiples of this."""
INTEGER_ROWS = 32
"""The integer kernel needs more than 16 rows."""


def _product(call: Call, rows: int, adds_up: bool, scales: list[list]) -> Rule:
    (m, k), n = call.operands[0].shape, call.operands[1].shape[1]
    sizes = {"rows": rows, "run": ALIGNMENT_BYTES}

    def split(letter: str, size: int, unit: str) -> list[str] | None:
        sizes[letter] = size // sizes[unit]
        return [letter, unit] if size % sizes[unit] == 0 else None

    a, b, c = split("m", m, "rows"), split("k", k, "run"), split("n", n, "run")
    named = {"m": a, "n": c}
    own = [[named.get(x) for x in letters] for letters in scales]
    blocked = ["run", "rows"] + ([] if adds_up else ["k"])
    return make_rule(call, [[a, b], [b, c], *own], [[a, c]], sizes=sizes, summed="k" if adds_up else (), blocked=blocked)


@rule("aten::_int_mm", heavy="matmul", flops=contraction(0))
def int_mm(call: Call) -> Rule:
    """int8 (m, k) @ int8 (k, n) -> int32. Partial sums are exact: integer overflow wraps in any order."""
    return _product(call, INTEGER_ROWS, True, [])


def _local_scaled_mm(call: LocalCall, insert: Insert) -> Node:
    """The kernel requires packed rows of the first operand and packed columns of the second."""
    a, b, *rest = call.args
    if a.meta["val"].stride(1) != 1:
        a = packed_copy(insert, a)
    if b.meta["val"].stride(0) != 1:
        b = column_major(insert, b)
    return insert(call.target, a, b, *rest, **call.kwargs)


@rule("aten::_scaled_mm", heavy="matmul", local=_local_scaled_mm)
def scaled_mm(call: Call) -> Rule | None:
    """args: a (m, k), b (k, n), scale of a, scale of b; bias (n), scale of the result, ...

    One scale per tensor, or one per row of a and per column of b; block scales have no rule.
    """
    m, n = call.operands[0].shape[0], call.operands[1].shape[1]
    scales: list[list] = [[] for _ in call.operands[2:]]
    for position, letters, shape in ((2, ["m", None], (m, 1)), (3, [None, "n"], (1, n)), (4, ["n"], (n,))):
        given = call.argument(position, ("", "", "scale_a", "scale_b", "bias")[position])
        if not isinstance(given, Operand):
            continue
        own = call.operands[given.index].shape
        if own != shape and any(size != 1 for size in own):
            return None
        scales[given.index - 2] = letters if own == shape else [None] * len(own)
    given = call.argument(5, "scale_result")
    if isinstance(given, Operand):
        scales[given.index - 2] = [None] * len(call.operands[given.index].shape)
    alone = len(call.operands) == 4  # a bias or result scale would apply to every partial sum
    return _product(call, 1, alone and call.results[0].dtype in ROUNDED, scales)


@rule(
    "aten::fake_quantize_per_tensor_affine_cachemask", "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_tensor_affine", "aten::_fake_quantize_learnable_per_tensor_affine",
)
def per_tensor(call: Call) -> Rule:
    """Elementwise, with one scale and zero point for the tensor."""
    dims = range(len(call.results[0].shape))
    return make_rule(call, [dims, *([None] * len(o.shape) for o in call.operands[1:])], [dims] * len(call.results))


@rule(
    "aten::fake_quantize_per_channel_affine_cachemask", "aten::fake_quantize_per_channel_affine",
    "aten::_fake_quantize_learnable_per_channel_affine",
)
def per_channel(call: Call) -> Rule:
    """args: self, scale and zero point of each channel, dim of the channels, ..."""
    dims = range(len(call.results[0].shape))
    return make_rule(call, [dims, [call.args[3]], [call.args[3]]], [dims] * len(call.results))


@rule("aten::_fake_quantize_learnable_per_tensor_affine_backward", "aten::_fake_quantize_learnable_per_channel_affine_backward")
def learnable_backward(call: Call) -> Rule:
    """args: gradient, self, scale, zero point, dim of the channels for per-channel ones -> their gradients

    Gradients of scale and zero point are sums over the elements that they apply to.
    """
    dims = list(range(len(call.results[0].shape)))
    channel = "channel" in call.target._schema.name
    scale = [dims[call.args[4]]] if channel else [None] * len(call.operands[2].shape)
    own = [scale] if channel else [[None] * len(r.shape) for r in call.results[1:2]]
    return make_rule(call, [dims, dims, scale, scale], [dims, *own * 2], summed=dims)
