"""Sharding rules for pooling, resampling and padding: batch and channels can be sharded, space cannot.

Weighted sums are linear for floats only: for integers (uint8 images) each result is rounded.
"""
from __future__ import annotations

import torch

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.rule_table import rule
from passes.op_rules.sum_dtypes import ROUNDED

aten = torch.ops.aten
rule(aten.adaptive_max_pool3d_backward.default, layout=torch.Tensor.is_contiguous)
rule("prims::_low_memory_max_pool_offsets_to_indices", fusion="inlined")
rule(aten.max_pool2d_with_indices_backward.default, fusion="fuses")


def _per_channel(call: Call, spatial: int, linear: bool) -> Rule:
    """Rule in which the last `spatial` dims stay whole. linear: in the first operand."""
    letters = [[d if d < len(s.shape) - spatial else None for d in range(len(s.shape))] for s in call.operands]
    out = [[d if d < len(s.shape) - spatial else None for d in range(len(s.shape))] for s in call.results]
    return make_rule(call, letters, out, linear=[[0]] if linear else ())


@rule(
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default, "prims::_low_memory_max_pool_with_offsets",
    "prims::_low_memory_max_pool_offsets_to_indices",
)
def max_pool(call: Call) -> Rule:
    """The second argument (window or output size) has an entry per spatial dim."""
    return _per_channel(call, len(call.args[1]), False)


UPSAMPLING = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)
rule(*(f"aten::{name}_backward" for name in UPSAMPLING), sizes=2)


@rule(
    aten.avg_pool2d.default, aten.avg_pool3d.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default,
    *(f"aten::{name}{direction}" for name in UPSAMPLING for direction in ("", "_backward")),
)
def resample(call: Call) -> Rule:
    """Forward or backward: the second argument has an entry per spatial dim."""
    return _per_channel(call, len(call.args[1]), call.results[0].dtype in ROUNDED)


@rule(
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
)
def pool_backward(call: Call) -> Rule:
    """args: gradient, input, window, …, indices for max pooling"""
    return _per_channel(call, len(call.args[2]), True)


@rule(aten._adaptive_avg_pool2d_backward.default, aten.adaptive_max_pool2d_backward.default)
def adaptive_2d_backward(call: Call) -> Rule:
    return _per_channel(call, 2, True)


@rule(aten._adaptive_avg_pool3d_backward.default, aten.adaptive_max_pool3d_backward.default)
def adaptive_3d_backward(call: Call) -> Rule:
    return _per_channel(call, 3, True)


@rule(
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default,
)
def pad(call: Call) -> Rule:
    """The second argument has two paddings per spatial dim."""
    return _per_channel(call, len(call.args[1]) // 2, True)


@rule(
    aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def pad_backward(call: Call) -> Rule:
    """args: gradient, input, paddings"""
    return _per_channel(call, len(call.args[2]) // 2, True)
