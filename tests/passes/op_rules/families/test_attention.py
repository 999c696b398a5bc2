"""Attention kernels. Those of GPUs run here through a stand-in with the same signature, and as they are where there is one."""
from __future__ import annotations

import math

import pytest
import torch

from tests.passes.op_rules.families.harness import check, f, sample

aten = torch.ops.aten
B, H, S, T, D = 4, 8, 6, 10, 8
CPU, CPU_BACKWARD = (aten._scaled_dot_product_flash_attention_for_cpu.default,
                     aten._scaled_dot_product_flash_attention_for_cpu_backward.default)


# --- the mathematics ---------------------------------------------------------------------------------------------------


def _scores(q, k, mask, causal, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores


def attend(q, k, v, mask=None, causal=False, scale=None):
    """(result, log-sum-exp of the scores)"""
    scores = _scores(q, k, mask, causal, scale)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend_backward(grad, q, k, v, mask=None, causal=False, scale=None, with_mask=False):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if with_mask:
        mask = mask.detach().requires_grad_()
        leaves.append(mask)
    with torch.enable_grad():
        out, _ = attend(*leaves[:3], mask, causal, scale)
        return torch.autograd.grad(out, leaves, grad)


def _state() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = attend(q, k, v, None, is_causal, scale)
    return out, lse.float(), None, None, q.shape[2], k.shape[2], _state(), _state(), q.new_empty(0)


def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse = attend(q, k, v, attn_bias, is_causal, scale)
    return out, torch.nn.functional.pad(lse.float(), (0, -q.shape[2] % 32)), _state(), _state()


def cudnn(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = attend(q, k, v, attn_bias, is_causal, scale)
    return out, lse.float()[..., None], None, None, q.shape[2], k.shape[2], _state(), _state(), None


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None):
    return attend_backward(grad, q, k, v, None, is_causal, scale)


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None):
    found = attend_backward(grad, q, k, v, bias, is_causal, scale, with_mask=wanted[3])
    return (*found, None)[:4]


def cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *,
                   scale=None):
    return attend_backward(grad, q, k, v, bias, is_causal, scale)


# --- samples -----------------------------------------------------------------------------------------------------------


def qkv(heads=H, groups=H, keys=T):
    return f(B, heads, S, D), f(B, groups, keys, D), f(B, groups, keys, D)


def cpu(q, k, v, mask=None, causal=False, scale=None, expect=""):
    """Forward and backward with consistent operands."""
    heads = "; S(1.1) R R M -> S(1.1) S(1.1)" if q.shape[1] != k.shape[1] else ""
    forward = sample(CPU, q, k, v, 0.0, causal, attn_mask=mask, scale=scale, expect=expect or heads.replace(" M", ""))
    out, lse = CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return [forward, sample(CPU_BACKWARD, f(*out.shape), q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale,
                            expect="P R R R R R -> P P P" if mask is None else "P R R R R R R -> P P P")]


HEADS = "S(0) S(0) S(0) -> S(0) S(0); S(1) S(1) S(1) -> S(1) S(1)"
ON_CPU = [
    *cpu(*qkv(), expect=HEADS + "; S(2) R R -> S(2) S(2)"),
    *cpu(*qkv(keys=S), causal=True, expect=HEADS),
    *cpu(*qkv(groups=2), expect=HEADS + "; S(1.1) R R -> S(1.1) S(1.1)"),  # query heads that share keys
    *cpu(*qkv(groups=1), expect="S(0) S(0) S(0) -> S(0) S(0); S(1) R R -> S(1) S(1)"),
    *cpu(*qkv(), scale=0.3),
    *cpu(*qkv(), mask=f(B, H, S, T), expect="S(1) S(1) S(1) S(1) -> S(1) S(1); S(2) R R S(2) -> S(2) S(2)"),
    *cpu(*qkv(), mask=f(B, 1, S, T), expect="S(0) S(0) S(0) S(0) -> S(0) S(0); S(1) S(1) S(1) R -> S(1) S(1)"),
    *cpu(*qkv(), mask=f(B, 1, 1, T), expect="S(2) R R R -> S(2) S(2)"),
    *cpu(*qkv(), mask=f(1, H, S, T), expect="S(0) S(0) S(0) R -> S(0) S(0)"),
    *cpu(*qkv(), mask=f(S, T), expect="S(2) R R S(0) -> S(2) S(2)"),
    *cpu(*qkv(), mask=f(1, 1, 1, T).sign(), expect="S(1) S(1) S(1) R -> S(1) S(1)"),
    *cpu(*qkv(groups=2), mask=f(B, H, S, T), expect="S(1.1) R R S(1.1) -> S(1.1) S(1.1)"),
]


def on_gpu(target, stand_in, *args, expect="", **kwargs):
    return sample(target, *args, expect=expect, stand_in=stand_in, on="cuda", **kwargs)


def _flash(q, k, v, causal=False, expect=""):
    out, lse = attend(q, k, v, None, causal)
    common = (None, None, q.shape[2], k.shape[2], 0.0, causal, _state(), _state())
    return [
        on_gpu(aten._scaled_dot_product_flash_attention.default, flash, q, k, v, 0.0, causal, expect=expect),
        on_gpu(aten._scaled_dot_product_flash_attention_backward.default, flash_backward, f(*out.shape), q, k, v, out,
               lse.float(), *common, expect="P R R R R R R R -> P P P"),
    ]


def _biased(q, k, v, bias=None, causal=False, gradient=False, expect=""):
    out, lse = attend(q, k, v, bias, causal)
    padded = torch.nn.functional.pad(lse.float(), (0, -q.shape[2] % 32))
    grad = f(*out.shape)
    extra = " R" if bias is not None else ""
    return [
        on_gpu(aten._scaled_dot_product_efficient_attention.default, efficient, q, k, v, bias, True, 0.0, causal,
               expect=expect + " R R" if expect else ""),
        on_gpu(aten._scaled_dot_product_cudnn_attention.default, cudnn, q, k, v, bias, True, 0.0, causal,
               expect=expect + " R R" if expect else ""),
        on_gpu(aten._scaled_dot_product_efficient_attention_backward.default, efficient_backward, grad, q, k, v, bias, out,
               padded, _state(), _state(), 0.0, [True, True, True, gradient], causal,
               expect=f"P R R R{extra} R R R R -> P P P" + (" P" if gradient else "")),
        on_gpu(aten._scaled_dot_product_cudnn_attention_backward.default, cudnn_backward, grad, q, k, v, out,
               lse.float()[..., None], _state(), _state(), bias, None, None, q.shape[2], k.shape[2], 0.0, causal,
               expect=f"P R R R R R R R{extra} -> P P P"),
    ]


ON_GPU = [
    *_flash(*qkv(), expect="S(1) S(1) S(1) -> S(1) S(1) R R R; S(2) R R -> S(2) S(2) R R R"),
    *_flash(*qkv(keys=S), causal=True),
    *_flash(*qkv(groups=2), expect="S(1.1) R R -> S(1.1) S(1.1) R R R"),
    *_biased(*qkv(), expect="S(1) S(1) S(1) -> S(1) S(1)"),
    *_biased(*qkv(keys=S), causal=True),
    *_biased(*qkv(), bias=f(B, H, S, T), gradient=True, expect="S(1) S(1) S(1) S(1) -> S(1) S(1)"),
    *_biased(*qkv(), bias=f(1, H, S, T), gradient=True, expect="S(0) S(0) S(0) R -> S(0) S(0)"),
    *_biased(*qkv(), bias=f(B, 1, 1, T), expect="S(0) S(0) S(0) S(0) -> S(0) S(0)"),
]
SAMPLES = ON_CPU + ON_GPU
DROPOUT = [
    on_gpu(aten._scaled_dot_product_flash_attention.default, flash, *qkv(), 0.1, whole=True, values=False),
    on_gpu(aten._scaled_dot_product_efficient_attention.default, efficient, *qkv(), None, True, 0.1, whole=True),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0


@pytest.mark.parametrize("case", DROPOUT, ids=str)
def test_a_kernel_that_draws_its_own_mask_stays_whole(case):
    assert check(case) == 0


@pytest.mark.parametrize("case", [s for s in ON_CPU if s.args[4 if s.target is CPU else 7 :][:1] == (True,)], ids=str)
def test_queries_of_causal_attention_stay_whole(case):
    """The kernel takes its first query for position 0."""
    from tests.passes.op_rules.families.harness import Run

    query = 0 if case.target is CPU else 1
    assert not any(s.split(" ")[query].startswith("S(2") for s in Run(case).check())


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_stand_ins_compute_what_the_kernels_do(case):
    """Results and gradients of the kernel itself, in bfloat16."""
    from passes.compat import pytree

    def move(x):
        return x.to("cuda", torch.bfloat16 if x.dtype == torch.float64 else None) if isinstance(x, torch.Tensor) else x

    if "backward" in str(case.target):
        pytest.skip("needs the state that its own forward left")
    args = list(pytree.tree_map(move, case.args))
    if len(args) > 3 and isinstance(args[3], torch.Tensor):  # as torch's own attention gives it: whole, with aligned rows
        bias = args[3].expand(B, H, S, T)
        args[3] = torch.nn.functional.pad(bias, (0, -T % 16))[..., :T]
    made = case.target(*args, **case.kwargs)
    expected = case.stand_in(*case.args, **case.kwargs)
    torch.testing.assert_close(made[0].cpu().double(), expected[0], atol=5e-2, rtol=5e-2)
    assert [getattr(x, "shape", x) for x in made[:2]] == [getattr(x, "shape", x) for x in expected[:2]]
