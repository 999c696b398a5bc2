"""Convolution and pooling: batch and channels split, space stays whole."""
from __future__ import annotations

import torch

from passes.rules.base import Call, Operand, Rule, make_rule
from passes.rules.table import rule

aten, prims = torch.ops.aten, torch.ops.prims


@rule(aten.convolution.default, heavy=True)
def convolution(call: Call) -> Rule:
    """args: input, weight, bias, stride, padding, dilation, transposed, output_padding, groups"""
    transposed, groups = call.args[6], call.args[8]
    space = [None] * (len(call.operands[0].shape) - 2)
    i, o = ("i", "o") if groups == 1 else (None, None)
    weight = [i, o] if transposed else [o, i]
    inputs = [["n", i, *space], [*weight, *space]]
    has_bias = len(call.operands) > 2
    if has_bias:
        inputs.append([o])
    return make_rule(
        call, inputs, [["n", o, *space]], summed=["i"] if groups == 1 else (),
        linear=[[0, 2], [1, 2]] if has_bias else [[0], [1]], addends=[2] if has_bias else (),
    )


@rule(aten.convolution_backward.default, heavy=True)
def convolution_backward(call: Call) -> Rule | None:
    """args: grad_output, input, weight, bias_sizes, ..., groups, output_mask; results only those that the mask asks for."""
    transposed, groups, wanted = call.args[7], call.args[9], call.args[10]
    space = [None] * (len(call.operands[0].shape) - 2)
    i, o = ("i", "o") if groups == 1 else (None, None)
    weight = [*([i, o] if transposed else [o, i]), *space]
    full = [["n", i, *space], weight, [o]]
    outs = [letters for letters, want in zip(full, wanted) if want]
    if len(outs) != len(call.results):
        return None
    # Splitting output channels sums the gradient of the input; splitting the batch sums those of weight and bias.
    # Input channels split the gradients of input and weight, but the bias gradient would be computed on every rank:
    # it carries no `i`, so that letter is blocked where a bias gradient is asked for.
    return make_rule(
        call, [["n", o, *space], ["n", i, *space], weight], outs,
        summed=[x for x in ("n", o) if x is not None],
        blocked=["i"] if wanted[2] else (), linear=[[0]],
    )


@rule(
    aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default, aten.avg_pool3d.default,
    aten.max_pool2d_with_indices_backward.default, aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default,
    aten.reflection_pad2d.default, aten.replication_pad2d.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d_backward.default, aten.reflection_pad2d_backward.default,
)
def per_channel(call: Call) -> Rule:
    """Batch and channel dims pass through; the last two are taken together."""
    rank = len(call.results[0].shape)
    spatial = 3 if call.target is aten.avg_pool3d.default else 2
    letters = [d if d < rank - spatial else None for d in range(rank)]
    nonlinear = call.target in (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
    first = isinstance(call.args[0], Operand)
    return make_rule(
        call, [letters] * len(call.operands), [letters] * len(call.results),
        linear=[] if nonlinear or not first or len(call.operands) > 1 else [[0]],
    )


def _low_memory_pool(call: Call) -> Rule:
    rank = len(call.results[0].shape)
    letters = [d if d < rank - 2 else None for d in range(rank)]
    return make_rule(call, [letters] * len(call.operands), [letters] * len(call.results))


for _name in ("_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices"):
    if hasattr(prims, _name):  # inductor registers these when its lowerings are imported
        rule(getattr(prims, _name).default)(_low_memory_pool)
