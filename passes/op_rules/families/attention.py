"""Sharding rules for scaled dot-product attention, forward and backward, on CPU and GPU.

Letters: b batch, g groups of heads that share keys (kv heads), r query heads per group, s query positions. Every query
position needs all keys and values, so their sequence has no letter. Sharding `s` is allowed for attention that is not
causal (a causal kernel derives the mask from positions that start at 0). Calls with dropout have no rule: the kernel
draws its mask from a seed, so all shards would get the same mask.
"""
# A rule is only called for its operators, so the number and types of arguments are known.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Operand, Rule, make_rule
from passes.op_rules.local_call import Insert, LocalCall, last_dim_packed
from passes.op_rules.rule_table import rule

aten = torch.ops.aten


def attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> float:
    """q kᵀ and p v, for q (batch, heads, m, d), k (…, n, d), v (…, n, e); k and v may have fewer heads."""
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def attention_backward_flops(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **kwargs: Any) -> float:
    """q kᵀ again, then the gradients of p, v, q and k."""
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


rule("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math",
     "aten::_scaled_dot_product_attention_math_for_mps", "aten::_scaled_dot_product_flash_attention.quantized",
     "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_triton_scaled_dot_attention", flops=attention_flops)
rule("aten::_scaled_dot_product_fused_attention_overrideable_backward", flops=attention_backward_flops)


def _letters(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[list, list, dict]:
    groups = k[1]
    heads = q[1]
    if heads % groups:
        return ["b", None, "s", None], ["b", None, None, None], {}
    return ["b", ["g", "r"], "s", None], ["b", "g", None, None], {"g": groups, "r": heads // groups}


def _mask(shape: tuple[int, ...], heads: object) -> list:
    """Letters of a mask: dims of size 1 are broadcast, the dim of keys stays whole."""
    full = ["b", heads, "s", None]
    return [x if size > 1 else None for x, size in zip(full[4 - len(shape):], shape)]


def _index(x: object) -> int | None:
    return x.index if isinstance(x, Operand) else None


def _build(call: Call, roles: dict[int, str], outs: dict[int, str], q: int, k: int, causal: bool, dropout: float,
           backward: bool) -> Rule | None:
    """Build the rule. roles: operand -> q, k, lse or mask; other operands are whole. outs: result -> q, k, lse or mask; other
    results are put aside."""
    if dropout:
        return None
    ql, kl, sizes = _letters(call.operands[q].shape, call.operands[k].shape)
    heads = ql[1]

    def entry(role: str | None, shape: tuple[int, ...]) -> list:
        if role == "q":
            return ql
        if role == "k":
            return kl
        if role == "mask":
            return _mask(shape, heads)
        if role == "lse":
            # Some kernels pad the last dim of the log-sum-exp, or append one of size 1.
            sequence = "s" if len(shape) > 2 and shape[2] == call.operands[q].shape[2] else None
            return ["b", heads, sequence, None][: len(shape)]
        return [None] * len(shape)

    inputs = [entry(roles.get(i), o.shape) for i, o in enumerate(call.operands)]
    outputs = [entry(outs.get(i), r.shape) for i, r in enumerate(call.results)]
    padded = any(outs.get(i) == "lse" and e[2] is None for i, e in enumerate(outputs)) or any(
        role == "lse" and inputs[i][2] is None for i, role in roles.items()
    )
    return make_rule(
        call, inputs, outputs, sizes=sizes,
        blocked=["s"] if causal or padded else (),
        # Gradients of keys sum over the queries (of a group), that of a mask over the dims along which it is broadcast.
        summed=["b", "g", "r", "s"] if backward else (),
        linear=[[0]] if backward else (),
        aside=[i for i in range(len(call.results)) if i not in outs],
        roles={"g": "heads", "r": "heads", "s": "sequence"},
    )


def _forward(call: Call, mask: object, dropout: float, causal: bool) -> Rule | None:
    roles = {0: "q", 1: "k", 2: "k"}
    if _index(mask) is not None:
        roles[_index(mask)] = "mask"
    return _build(call, roles, {0: "q", 1: "lse"}, 0, 1, causal, dropout, False)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default, heavy="attention", flops=attention_flops,
      layout=last_dim_packed)
def cpu_forward(call: Call) -> Rule | None:
    return _forward(call, call.kwargs.get("attn_mask"), call.argument(3, "dropout_p", 0.0),
                    call.argument(4, "is_causal", False))


@rule(aten._scaled_dot_product_flash_attention.default, heavy="attention", flops=attention_flops, layout=last_dim_packed)
def flash_forward(call: Call) -> Rule | None:
    return _forward(call, None, call.argument(3, "dropout_p", 0.0), call.argument(4, "is_causal", False))


@rule(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default, heavy="attention",
      flops=attention_flops, layout=last_dim_packed)
def biased_forward(call: Call) -> Rule | None:
    return _forward(call, call.argument(3, "attn_bias"), call.argument(5, "dropout_p", 0.0),
                    call.argument(6, "is_causal", False))


def _backward(call: Call, out: int | None, lse: int | None, mask: object, dropout: float, causal: bool) -> Rule | None:
    # Operand 0 is the gradient of the result; query, key, value follow.
    assert out is not None and lse is not None
    roles = {0: "q", 1: "q", 2: "k", 3: "k", out: "q", lse: "lse"}
    if _index(mask) is not None:
        roles[_index(mask)] = "mask"
    outs = {0: "q", 1: "k", 2: "k", 3: "mask"}
    return _build(call, roles, outs, 1, 2, causal, dropout, True)


def _local_lengths(position: int) -> Callable[[LocalCall, Insert], Node]:
    """Local call of kernels on GPUs that are told the lengths of their queries and keys, in this order from `position` on."""
    return lambda call, insert: insert(call.target, *call.args[:position], call.local_shapes[0][2], call.local_shapes[1][2],
                                       *call.args[position + 2:], **call.kwargs)


rule(aten._scaled_dot_product_flash_attention_backward.default, local=_local_lengths(8))
rule(aten._scaled_dot_product_cudnn_attention_backward.default, local=_local_lengths(11))


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, heavy="attention", flops=attention_backward_flops,
      layout=last_dim_packed)
def cpu_backward(call: Call) -> Rule | None:
    return _backward(call, _index(call.args[4]), _index(call.args[5]), call.kwargs.get("attn_mask"),
                     call.argument(6, "dropout_p", 0.0), call.argument(7, "is_causal", False))


@rule(aten._scaled_dot_product_flash_attention_backward.default, heavy="attention", flops=attention_backward_flops,
      layout=last_dim_packed)
def flash_backward(call: Call) -> Rule | None:
    return _backward(call, _index(call.args[4]), _index(call.args[5]), None, call.args[10], call.args[11])


@rule(aten._scaled_dot_product_efficient_attention_backward.default, heavy="attention", flops=attention_backward_flops,
      layout=last_dim_packed)
def efficient_backward(call: Call) -> Rule | None:
    """Rule of the memory-efficient backward. The fourth result, if any, is the gradient of the mask."""
    return _backward(call, _index(call.args[5]), _index(call.args[6]), call.args[4], call.args[9],
                     call.argument(11, "is_causal", False))


@rule(aten._scaled_dot_product_cudnn_attention_backward.default, heavy="attention", flops=attention_backward_flops,
      layout=last_dim_packed)
def cudnn_backward(call: Call) -> Rule | None:
    return _backward(call, _index(call.args[4]), _index(call.args[5]), call.args[8], call.args[13], call.args[14])
