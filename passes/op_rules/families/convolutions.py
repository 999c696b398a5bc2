"""Sharding rules for convolutions of one, two and three dims: batch, channels and groups can be sharded, space cannot.

Letters: n batch, g groups, i input channels per group, o output channels per group. A depthwise convolution has as many
groups as channels, so sharding `g` shards the channels of all operands.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.local_call import Insert, LocalCall
from passes.op_rules.rule_table import rule

aten = torch.ops.aten
OPERANDS = {"aten::convolution": 2, "aten::convolution_backward": 3}
"""By name, number of leading arguments that are operands of the computation; the last of them is the weight."""


def scratch_bytes(operands: int, weight: Sequence[float], out_bytes: float, itemsize: int) -> float:
    """Temporary memory of a convolution on a CPU, measured with torch 2.13. operands: as in OPERANDS. weight: its local shape.
    out_bytes: local bytes of the convolution's output. itemsize: bytes of an element.

    oneDNN converts the memory format: forward of the weight, backward of the other operands of its size, too. It has no
    float64: there, a matrix of a kernel's inputs for each element of the output is made, unless the kernel has one element.
    """
    if itemsize < torch.float64.itemsize:
        return (operands - 1) * math.prod(weight) * itemsize
    return out_bytes / weight[0] * math.prod(weight[1:]) if math.prod(weight[2:]) > 1 else 0.0


def _letters(call: Call, weight: int, transposed: bool, groups: int) -> tuple[list, list, list, list, dict]:
    """Letters of input, weight, bias and output, and sizes. weight: index of the weight among the operands."""
    shape = call.operands[weight].shape
    space = [None] * (len(shape) - 2)
    # The weight is (input channels, output channels per group) if transposed, else (output, input per group).
    per_group = [shape[0] // groups, shape[1]]
    i, o = per_group if transposed else per_group[::-1]
    rows, columns = ("i", "o") if transposed else ("o", "i")
    return (
        ["n", ["g", "i"], *space], [["g", rows], columns, *space], [["g", "o"]], ["n", ["g", "o"], *space],
        {"g": groups, "i": i, "o": o},
    )


def _local_groups(weight: Node, channels: int) -> int:
    """Number of groups, from the channels that the weight has per group (output channels if transposed)."""
    return int(channels) // int(weight.meta["val"].shape[1])


def _local_convolution(call: LocalCall, insert: Insert) -> Node:
    args = list(call.args)
    args[8] = _local_groups(args[1], call.local_shapes[0][1] if args[6] else args[0].meta["val"].shape[1])
    return insert(call.target, *args, **call.kwargs)


def _local_backward(call: LocalCall, insert: Insert) -> Node:
    args = list(call.args)
    channels = int(args[0].meta["val"].shape[1])
    if args[3] is not None:  # sizes of the bias: output channels, as grad_output has them locally
        args[3] = [channels]
    args[9] = _local_groups(args[2], channels if args[7] else args[1].meta["val"].shape[1])
    return insert(call.target, *args, **call.kwargs)


@rule(aten.convolution.default, heavy="convolution", local=_local_convolution)
def convolution(call: Call) -> Rule:
    """args: input, weight, bias, stride, padding, dilation, transposed, output_padding, groups"""
    x, weight, bias, out, sizes = _letters(call, 1, call.args[6], call.args[8])
    has_bias = len(call.operands) > 2
    return make_rule(
        call, [x, weight, bias] if has_bias else [x, weight], [out], sizes=sizes, summed="i",
        linear=[[0, 2], [1, 2]] if has_bias else [[0], [1]], addends=[2] if has_bias else (),
        roles=dict.fromkeys("gio", "channels"),
    )


def _backward_flops(grad: Any, x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> float:
    """Each wanted gradient costs as much as forward: each weight once per pixel of the output (transposed: input). torch 2.13
    counts 1 + g forward passes for g groups, in place of 2."""
    transposed = args[4]
    pixels = math.prod((x if transposed else grad).shape[2:])
    wanted = sum(args[7][:2])  # of the input, of the weight
    return 2.0 * x.shape[0] * pixels * math.prod(weight.shape) * wanted


@rule(aten.convolution_backward.default, heavy="convolution", flops=_backward_flops, local=_local_backward)
def convolution_backward(call: Call) -> Rule | None:
    """args: grad_output, input, weight, bias_sizes, ..., groups, output_mask; only the results in output_mask

    Sharding output channels makes the gradient of the input a partial sum; sharding the batch makes those of weight and bias
    partial sums. The gradient of the bias does not depend on input channels.
    """
    wanted = call.args[10]
    x, weight, bias, out, sizes = _letters(call, 2, call.args[7], call.args[9])
    outs = [letters for letters, want in zip((x, weight, bias), wanted) if want]
    if len(outs) != len(call.results):
        return None
    return make_rule(
        call, [out, x, weight], outs, sizes=sizes, summed="no", repeated={"i": [len(outs) - 1]} if wanted[2] else None,
        linear=[[0]],
    )


@rule(aten._weight_norm_interface.default, layout=torch.Tensor.is_contiguous)
def weight_norm(call: Call) -> Rule:
    """direction, magnitude (size 1 in all dims but one), that dim -> weight, norms"""
    dims = _one_dim(call, call.argument(2, "dim", 0))
    return make_rule(call, [dims, dims], [dims, dims])


@rule(aten._weight_norm_interface_backward.default, layout=torch.Tensor.is_contiguous)
def weight_norm_backward(call: Call) -> Rule:
    """gradient of the weight, direction, magnitude, norms, the dim -> gradients of direction and magnitude"""
    dims = _one_dim(call, call.argument(4, "dim"))
    return make_rule(call, [dims] * 4, [dims, dims], linear=[[0]])


def _one_dim(call: Call, dim: int) -> list[int | None]:
    return [d if d == dim else None for d in range(len(call.operands[0].shape))]
