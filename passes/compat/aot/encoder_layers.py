"""Decompositions of torch's fused layers for inference, which no rule can split: `nn.TransformerEncoderLayer` and
`nn.MultiheadAttention` call them without gradients."""
from __future__ import annotations

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
BY_KEY, BY_HEAD = 1, 2
"""Kinds of masks, of each row's keys and of all; 0: of queries and keys."""


def encoder_layer(
        src: Tensor, width: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
        use_gelu: bool, norm_first: bool, eps: float, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor,
        up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor, mask: Tensor | None = None,
        mask_type: int | None = None) -> Tensor:
    """`aten._transformer_encoder_layer_fwd`."""
    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight_1, bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight_2, bias_2, eps)

    def feed_forward(x: Tensor) -> Tensor:
        x = F.linear(x, up_weight, up_bias)
        return F.linear(F.gelu(x) if use_gelu else F.relu(x), down_weight, down_bias)

    x = norm_1(src) if norm_first else src
    q, k, v = F.linear(x, qkv_weight, qkv_bias).chunk(3, -1)
    x = src + F.linear(_attended(q, k, v, heads, _kept(mask, mask_type)), out_weight, out_bias)
    if norm_first:
        return x + feed_forward(norm_2(x))
    x = norm_1(x)
    return norm_2(x + feed_forward(x))


def multi_head_attention(
        query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
        out_weight: Tensor, out_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
        average_weights: bool = True, mask_type: int | None = None) -> tuple[Tensor, Tensor]:
    """`aten._native_multi_head_attention`."""
    q, k, v = (F.linear(x, weight, bias) for x, weight, bias in zip(
        (query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3)))
    kept = _kept(mask, mask_type)
    found = F.linear(_attended(q, k, v, heads, kept), out_weight, out_bias)
    if not need_weights:
        return found, found.new_empty(0)
    weights = (_by_head(q, heads) @ _by_head(k, heads).transpose(-1, -2)) * (width // heads) ** -0.5
    weights = (weights if kept is None else weights.masked_fill(~kept, -torch.inf)).softmax(-1)
    return found, weights.mean(1) if average_weights else weights


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attended(q: Tensor, k: Tensor, v: Tensor, heads: int, kept: Tensor | None) -> Tensor:
    found = F.scaled_dot_product_attention(*(_by_head(x, heads) for x in (q, k, v)), attn_mask=kept)
    return found.transpose(1, 2).flatten(-2)


def _kept(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """The pairs that count, by row, head, query and key. The operators take each number but 0 for a pair that does not."""
    if mask is None:
        return None
    kept = ~mask.bool()
    return kept[:, None, None] if mask_type == BY_KEY else kept if mask_type == BY_HEAD else kept[None, None]
