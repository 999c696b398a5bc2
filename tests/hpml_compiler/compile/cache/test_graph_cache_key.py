"""Two Dynamo graphs -> the same key where they would be compiled alike, another or none where they might not."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpml_compiler.compile.cache.graph_cache_key import Uncacheable, _canonical_text

X = torch.linspace(-1, 1, 32).view(4, 8)


def text_of(function, *arguments: torch.Tensor) -> str:
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*arguments)
    (gm,) = graphs
    return _canonical_text(gm)


def scaled(factor: float, dim: int = 0):
    return lambda x: (torch.nn.functional.gelu(x) * factor).sum(dim)


def in_a_checkpoint(inner):
    return lambda x: checkpoint(inner, x, use_reentrant=False)


def test_equal_programs_have_one_text():
    assert text_of(scaled(2.0), X) == text_of(scaled(2.0), X)
    assert text_of(in_a_checkpoint(torch.sin), X) == text_of(in_a_checkpoint(torch.sin), X)


@pytest.mark.parametrize("other", [scaled(3.0), scaled(2.0, 1), lambda x: (torch.nn.functional.silu(x) * 2.0).sum(0)])
def test_other_constants_and_calls_have_another(other):
    assert text_of(scaled(2.0), X) != text_of(other, X)


def test_what_a_checkpoint_computes_is_in_the_text():
    assert text_of(in_a_checkpoint(torch.sin), X) != text_of(in_a_checkpoint(torch.cos), X)


def keeps_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def policy():
    return create_selective_checkpoint_contexts(keeps_all)


def test_what_a_script_decides_by_a_function_is_not_told():
    with pytest.raises(Uncacheable, match="a checkpointed region has a context_fn"):
        text_of(lambda x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=policy), X.clone().requires_grad_())


@torch.library.custom_op("launch_key_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("call", [lambda x: torch.ops.launch_key_test.twice(x), lambda x: Twice.apply(x)],
                         ids=["an operator of a user", "a function with a backward of its own"])
def test_what_a_name_says_nothing_of_is_not_told(call):
    with pytest.raises(Uncacheable, match="the operator"):
        text_of(call, X.clone().requires_grad_())
