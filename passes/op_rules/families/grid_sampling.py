"""Sharding rules for grid sampling and segment reductions."""
# A rule is only called for its operators, so the number and types of arguments are known.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalSubscript=false
from __future__ import annotations

import torch

from passes.op_rules.base import Call, Rule, make_rule
from passes.op_rules.rule_table import rule

aten = torch.ops.aten


def _letters(call: Call, image: int) -> tuple[list, list, list]:
    """Letters of the image (n, c, space), the grid (n, points, coordinates) and the samples (n, c, points)."""
    points = [("point", d) for d in range(len(call.operands[image].shape) - 2)]
    return ["n", "c", *[None] * len(points)], ["n", *points, None], ["n", "c", *points]


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> Rule:
    image, grid, sampled = _letters(call, 0)
    return make_rule(call, [image, grid], [sampled], linear=[[0]])


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> Rule | None:
    """args: gradient, image, grid, three modes, output mask

    The gradient of the image sums over samples, that of the grid over channels.
    """
    image, grid, sampled = _letters(call, 1)
    outs = [letters for letters, want in zip((image, grid), call.args[6]) if want]
    if len(outs) != len(call.results):
        return None
    return make_rule(call, [sampled, image, grid], outs, summed=sampled[1:], linear=[[0]])


def _runs(call: Call, axis: int, runs: set[int]) -> list[list]:
    """Letters of operands. runs: operands with the lengths or offsets of segments, which have the dims up to `axis`."""
    before = list(range(axis))
    return [[*before, None] if i in runs else [*before, None, *range(axis + 1, len(o.shape))]
            for i, o in enumerate(call.operands)]


@rule(aten.segment_reduce.default)
def segment_reduce(call: Call) -> Rule:
    """args: data, how; lengths, indices, offsets, axis, unsafe, initial"""
    axis = call.kwargs.get("axis", 0)
    letters = _runs(call, axis, set(range(1, len(call.operands))))
    return make_rule(call, letters, [letters[0]])


@rule(aten._segment_reduce_backward.default)
def segment_reduce_backward(call: Call) -> Rule:
    """args: gradient, result, data, how; lengths, offsets, axis, initial"""
    axis = call.kwargs.get("axis", 0)
    letters = _runs(call, axis, set(range(3, len(call.operands))))
    return make_rule(call, letters, [letters[2]], linear=[[0]])
