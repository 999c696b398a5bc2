"""Samples of images at points of a grid, and reductions of runs of rows."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import check, f, sample

aten = torch.ops.aten
LENGTHS = torch.tensor([[3, 3, 2]] * 4)
OFFSETS = torch.tensor([0, 3, 3, 8])

SAMPLES = [
    sample(aten.grid_sampler_2d.default, f(4, 6, 5, 5), f(4, 8, 2, 2), 0, 0, False,
           expect="S(0) S(0) -> S(0); S(1) R -> S(1); R S(1) -> S(2); P R -> P"),
    sample(aten.grid_sampler_3d.default, f(4, 6, 5, 5, 3), f(4, 8, 2, 4, 3), 1, 1, True,
           expect="S(0) S(0) -> S(0); S(1) R -> S(1); R S(1) -> S(2); R S(3) -> S(4); P R -> P"),
    sample(aten.grid_sampler_3d_backward.default, f(4, 6, 8, 2, 4), f(4, 6, 5, 5, 3), f(4, 8, 2, 4, 3), 0, 0, False,
           [True, True],
           expect="S(0) S(0) S(0) -> S(0) S(0); S(1) S(1) R -> S(1) P; S(2) R S(1) -> P S(1); P R R -> P P"),
    sample(aten.grid_sampler_2d_backward.default, f(4, 6, 8, 2), f(4, 6, 5, 5), f(4, 8, 2, 2), 0, 0, False, [True, True],
           expect="S(0) S(0) S(0) -> S(0) S(0); S(1) S(1) R -> S(1) P; S(2) R S(1) -> P S(1); P R R -> P P"),
    sample(aten.segment_reduce.default, f(8, 4), "sum", lengths=LENGTHS[0], unsafe=True, initial=0.0, expect="S(1) R -> S(1)"),
    sample(aten.segment_reduce.default, f(8, 4, 6), "max", offsets=OFFSETS, unsafe=True,
           expect="S(1) R -> S(1); S(2) R -> S(2)"),
    sample(aten.segment_reduce.default, f(4, 8, 6), "mean", lengths=LENGTHS, axis=1, unsafe=True,
           expect="S(0) S(0) -> S(0); S(2) R -> S(2)"),
    sample(aten._segment_reduce_backward.default, f(3, 4), f(3, 4), f(8, 4), "sum", lengths=LENGTHS[0], axis=0, initial=0,
           expect="S(1) S(1) S(1) R -> S(1); P R R R -> P"),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0
