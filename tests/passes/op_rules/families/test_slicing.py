"""Cutting dims and putting them together: equal parts, and parts with a common divisor, split inside."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import Run, check, f, sample

aten = torch.ops.aten
END = 9223372036854775807  # what a slice without an end is traced to

SAMPLES = [
    sample(aten.slice.Tensor, f(12, 8), 0, 4, 8, expect="S(0.1) -> S(0); S(1) -> S(1); P -> P"),
    sample(aten.slice.Tensor, f(12, 8), 0, -4, END, expect="S(0.1) -> S(0)"),
    sample(aten.slice.Tensor, f(12, 8), 0, 0, -4, expect="S(0.1) -> S(0.1)"),
    sample(aten.slice.Tensor, f(8, 12), -1, 0, 6, expect="S(0) -> S(0); S(1.1) -> S(1)"),
    sample(aten.slice.Tensor, f(8, 12), 1, 0, 8, expect="S(0) -> S(0); S(1.1) -> S(1.1)"),
    sample(aten.slice.Tensor, f(8, 12), 1, 3, 11, expect="S(0) -> S(0)"),
    sample(aten.slice.Tensor, f(8, 12), 1, 0, END, 2, expect="S(0) -> S(0); S(1) -> S(1)"),
    sample(aten.slice.Tensor, f(8, 12), 1, 1, END, 3, expect="S(1) -> S(1)"),
    sample(aten.slice.Tensor, f(8, 12), 1, 2, 10, 2, expect="S(0) -> S(0)"),
    sample(aten.slice.Tensor, f(8, 12), expect="S(0) -> S(0); S(1) -> S(1)"),
    sample(aten.slice.Tensor, f(8, 12), 0, 2, 2, expect="S(1) -> S(1)"),
    sample(aten.slice.Tensor, f(8, 12), 0, -100, 100, expect="S(0) -> S(0)"),
    sample(aten.slice_scatter.default, f(12, 8), f(4, 8), 0, 4, 8, expect="S(0.1) S(0) -> S(0.1); S(1) S(1) -> S(1); P P -> P"),
    sample(aten.slice_scatter.default, f(8, 12), f(8, 9), 1, 3, END, expect="S(0) S(0) -> S(0)"),
    sample(aten.slice_scatter.default, f(8, 12), f(8, 6), 1, 1, END, 2, expect="S(0) S(0) -> S(0); S(1) S(1) -> S(1)"),
    sample(aten.split.Tensor, f(12, 8), 4, expect="S(0.1) -> S(0) S(0) S(0); S(1) -> S(1) S(1) S(1)"),
    sample(aten.split.Tensor, f(8, 12), 5, -1, expect="S(0) -> S(0) S(0) S(0)"),
    sample(aten.split_with_sizes.default, f(8, 12), [4, 4, 4], 1, expect="S(1.1) -> S(1) S(1) S(1)"),
    sample(aten.split_with_sizes.default, f(8, 16), [8, 4, 4], -1, expect="S(1.1) -> S(1.1) S(1) S(1)"),
    sample(aten.unbind.int, f(8, 3, 4), 1, expect="S(0) -> S(0) S(0) S(0); S(2) -> S(1) S(1) S(1); P -> P P P"),
    sample(aten.unbind.int, f(2, 4), expect="S(1) -> S(0) S(0)"),
    sample(aten.cat.default, [f(8, 4), f(8, 4)], -1, expect="S(0) S(0) -> S(0); S(1) S(1) -> S(1.1); P P -> P"),
    sample(aten.cat.default, [f(8, 8), f(8, 4)], 1, expect="S(0) S(0) -> S(0); S(1.1) S(1) -> S(1.1)"),
    sample(aten.cat.default, [f(8, 4), f(5, 4)], expect="S(1) S(1) -> S(1)"),
    sample(aten.cat.default, [f(0), f(8, 4)], expect="R S(1) -> S(1)"),
    sample(aten.cat.default, [f(8, 4)], 1, expect="S(1) -> S(1)"),
    sample(aten.stack.default, [f(8, 4), f(8, 4)], 1, expect="S(0) S(0) -> S(0); S(1) S(1) -> S(2)"),
    sample(aten.stack.default, [f(8, 4), f(8, 4)], -1, expect="S(1) S(1) -> S(1)"),
    sample(aten.select.int, f(8, 3, 4), 1, -1, expect="S(0) -> S(0); S(2) -> S(1); P -> P"),
    sample(aten.select_scatter.default, f(8, 3, 4), f(8, 4), 1, 2, expect="S(0) S(0) -> S(0); S(2) S(1) -> S(2); P P -> P"),
    sample(aten.constant_pad_nd.default, f(8, 4, 6), [1, 2], expect="S(0) -> S(0); S(1) -> S(1); P -> P"),
    sample(aten.constant_pad_nd.default, f(8, 4, 6), [0, 0, -1, 1], 3.0, expect="S(0) -> S(0); S(2) -> S(2)"),
    sample(aten.constant_pad_nd.default, f(8, 4), [0, 0, 0, 4], expect="S(1) -> S(1)"),
    sample(aten.glu.default, f(8, 12), -1, expect="S(0) -> S(0); S(1.1) -> S(1)"),
    sample(aten.glu_backward.default, f(8, 6), f(8, 12), -1, expect="S(0) S(0) -> S(0); S(1) S(1.1) -> S(1.1); P R -> P"),
    sample(aten.slice.Tensor, f(8, 1030), 1, 0, 1028, expect="S(0) -> S(0)"),
    # Fused query, key and value of 2 heads of 4, beside one another: each is split by heads, or inside heads.
    sample(aten.split.Tensor, f(6, 24), 8, 1, expect="S(1.1) -> S(1) S(1) S(1)"),
    # 4 query heads, 2 key heads, 2 value heads of 4 in one product.
    sample(aten.split_with_sizes.default, f(6, 32), [16, 8, 8], 1, expect="S(1.1) -> S(1.1) S(1) S(1)"),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0


def test_a_window_that_is_a_tiny_share_is_not_followed():
    """1030 and 1028 have the divisor 2: alternating elements are nobody's wish."""
    assert not any("S(1" in s for s in Run(sample(aten.slice.Tensor, f(8, 1030), 1, 0, 1028)).check())
