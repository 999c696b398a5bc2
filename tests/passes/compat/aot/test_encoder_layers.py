"""torch's fused layers for inference -> the same numbers from operators that can be split."""
from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from passes.compat.aot.decomposition_tables import eager_decompositions
from passes.compat.aot.encoder_layers import multi_head_attention

PADDED = torch.tensor([[False] * 4 + [True] * 2, [False] * 6, [False, True] + [False] * 4])
LATER = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
X = torch.linspace(-1, 1, 3 * 6 * 16, dtype=torch.float64).view(3, 6, 16).sin()
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"src_key_padding_mask": PADDED}, {"src_mask": LATER}, {"src_mask": LATER, "src_key_padding_mask": PADDED})


def fused(name: str, layer: nn.Module, *inputs: torch.Tensor, **options: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Result of a layer in evaluation without gradients, and the arguments of its only call of a fused operator."""
    calls: list[Any] = []
    real = getattr(torch, name)

    def noted(*args: Any, **more: Any) -> Any:
        calls.append((args, more))
        return real(*args, **more)

    with patch.object(torch, name, noted):
        found = layer.eval().double().requires_grad_(False)(*inputs, **options)
    ((args, more),) = calls
    return found, args, more


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_is_made_of_operators_that_can_be_split(norm_first):
    table, name = eager_decompositions(), "_transformer_encoder_layer_fwd"
    for activation, masks in itertools.product(("relu", "gelu"), MASKS):
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, activation=activation)
        expected, args, _ = fused(name, layer, X, **masks)
        traced = make_fx(getattr(torch, name), decomposition_table=table)(*args)
        assert not any(name in str(node.target) for node in traced.graph.nodes)
        torch.testing.assert_close(traced(*args), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, PADDED])
def test_attention_without_gradients_is_made_of_them_too(mask):
    for weights, average in itertools.product((True, False), (True, False)):
        expected, args, more = fused(
            "_native_multi_head_attention", nn.MultiheadAttention(16, 4, batch_first=True), X, X, X, key_padding_mask=mask,
            need_weights=weights, average_attn_weights=average)
        for ours, theirs in zip(multi_head_attention(*args, **more), expected, strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
