"""Views and copies that move elements: dims are followed factor by factor."""
from __future__ import annotations

import pytest
import torch

from passes.op_rules.families.view_ops import view_letters
from tests.passes.op_rules.families.harness import b, check, f, i, sample

aten = torch.ops.aten

SAMPLES = [
    sample(aten.view.default, f(32, 8), [8, 4, 8], expect="S(0) -> S(0); S(0.1) -> S(1); S(1) -> S(2); P -> P"),
    sample(aten.view.default, f(8, 4, 6), [32, 6], expect="S(0) -> S(0); S(1) -> S(0.1)"),
    sample(aten.view.default, f(8 * 2, 4 * 6), [8, 2, 4, 6], expect="S(0) -> S(0); S(0.1) -> S(1); S(1.1) -> S(3)"),
    sample(aten.view.default, f(6, 4), [2, 12], expect="S(0) -> S(0); S(0.1) -> S(1)"),
    sample(aten.view.default, f(12, 10), [8, 15], expect="S(0) -> S(0)"),
    sample(aten.view.default, f(8, 1, 6), [8, 6, 1, 1], expect="S(0) -> S(0); S(2) -> S(1)"),
    sample(aten.view.default, f(2, 4), [8], expect="S(0) -> S(0); S(1) -> S(0.1)"),
    sample(aten.view.default, f(3, 5, 4), [5, 3, 4], expect="S(2) -> S(2)"),
    sample(aten.view.default, f(0, 4), [4, 0], whole=True),
    sample(aten.view.default, b(8, 4), [32]),
    sample(aten._unsafe_view.default, f(8, 4), [2, 4, 4], expect="S(0) -> S(0); S(0.1) -> S(1)"),
    sample(aten.reshape.default, f(8, 4), [4, -1], expect="S(0) -> S(0)"),
    sample(aten.view.dtype, f(6, 1), torch.int32, expect="S(0) -> S(0)"),
    sample(aten.view.dtype, torch.complex(f(6, 1), f(6, 1)), torch.float64, expect="S(0) -> S(0)"),
    sample(aten.view.dtype, f(8, 4, dtype=torch.float32), torch.int32, expect="S(0) -> S(0); S(1) -> S(1)"),
    sample(aten.view.dtype, f(8, 4, dtype=torch.float32), torch.int16, expect="S(0) -> S(0)"),
    sample(aten.unsqueeze.default, f(8, 4), -1, expect="S(0) -> S(0); S(1) -> S(1); P -> P"),
    sample(aten.squeeze.dim, f(8, 1, 2), 1, expect="S(0) -> S(0); S(2) -> S(1)"),
    sample(aten.squeeze.dim, f(8, 2), 1, expect="S(1) -> S(1)"),
    sample(aten.squeeze.dims, f(2, 1, 4, 1), [1, 3], expect="S(0) -> S(0); S(2) -> S(1)"),
    sample(aten.squeeze.default, f(2, 1, 4), expect="S(0) -> S(0); S(2) -> S(1)"),
    sample(aten.as_strided.default, f(8, 4, 1), [2, 4, 4], [16, 4, 1], expect="S(0) -> S(0); S(0.1) -> S(1); P -> P"),
    sample(aten.as_strided.default, f(8, 1, 4), [8, 4], [4, 1], 0, expect="S(0) -> S(0)"),
    sample(aten.as_strided.default, f(8, 4), [4, 8], [1, 4], whole=True),
    sample(aten.as_strided.default, f(8, 4), [7, 8], [4, 1], whole=True),
    sample(aten.as_strided_scatter.default, f(32), f(8, 4), [8, 4], [4, 1], 0,
           expect="S(0) S(0) -> S(0); S(0.1) S(1) -> S(0.1); R P -> P"),
    sample(aten.as_strided_scatter.default, f(32), f(4, 4), [4, 4], [4, 1], 4, whole=True),
    sample(aten.permute.default, f(8, 4, 6), [2, 0, 1], expect="S(0) -> S(1); S(1) -> S(2); S(2) -> S(0); P -> P"),
    sample(aten.permute.default, f(8, 4, 6), [0, -1, 1], expect="S(1) -> S(2)"),
    sample(aten.t.default, f(8, 4), expect="S(0) -> S(1)"),
    sample(aten.t.default, f(8), expect="S(0) -> S(0)"),
    sample(aten.transpose.int, f(8, 4, 6), 0, -1, expect="S(0) -> S(2); S(1) -> S(1)"),
    sample(aten.expand.default, f(1, 4), [8, 4], expect="R -> S(0); S(1) -> S(1); P -> P"),
    sample(aten.expand.default, f(8, 1, 1), [2, 8, 6, -1], expect="R -> S(0); S(0) -> S(1); R -> S(2)"),
    sample(aten.repeat.default, f(8, 4), [1, 3], expect="S(0) -> S(0); S(1) -> S(1.1)"),
    sample(aten.repeat.default, f(8, 4), [2, 4, 1], expect="R -> S(0); S(1) -> S(2); R -> S(1); S(0) -> S(1.1)"),
    sample(aten.roll.default, f(8, 4, 6), [1], [1], expect="S(0) -> S(0); S(2) -> S(2); P -> P"),
    sample(aten.roll.default, f(8, 4), [3], whole=True),
    sample(aten.diagonal.default, f(8, 4, 4), 0, 1, 2, expect="S(0) -> S(0); P -> P"),
    sample(aten.diagonal.default, f(4, 4, 8), 1, expect="S(2) -> S(0)"),
    sample(aten.diagonal_scatter.default, f(8, 4, 4), f(8, 4), 0, 1, 2, expect="S(0) S(0) -> S(0); P P -> P"),
    sample(aten.unfold.default, f(8, 12), 1, 4, 2, expect="S(0) -> S(0); P -> P"),
    sample(aten.unfold_backward.default, f(8, 5, 4), [8, 12], 1, 4, 2, expect="S(0) -> S(0); P -> P"),
    sample(aten.view_as_real.default, torch.complex(f(8, 4), f(8, 4)), expect="S(0) -> S(0); S(1) -> S(1); P -> P"),
    sample(aten.view_as_complex.default, f(8, 4, 2), expect="S(0) -> S(0); S(1) -> S(1); P -> P"),
    sample(aten.alias.default, i(9, 8), expect="S(0) -> S(0); P -> P"),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0 or case.whole


@pytest.mark.parametrize(("old", "new", "a", "b"), [
    ((6, 4), (2, 12), [[2, 3], [4]], [[2], [3, 4]]),
    ((131072,), (16, 8192), [[16, 8192]], [[16], [8192]]),
    ((8, 1, 4096), (8, 32, 128), [[8], [], [32, 128]], [[8], [32], [128]]),
    ((12, 10), (8, 15), [[4, "x"], ["x"]], [[4, "x"], ["x"]]),  # 4 is outer in both; 3 * 10 and 2 * 15 meet nowhere
    ((0, 4), (4, 0), [[], []], [[], []]),
])
def test_letters_of_a_reshape_are_the_common_factors(old, new, a, b):
    rows_old, rows_new, sizes, blocked = view_letters(old, new)
    shown = [[["x" if letter in blocked else sizes[letter] for letter in row] for row in rows]
             for rows in (rows_old, rows_new)]
    assert shown == [a, b]
    common = [[letter for row in rows for letter in row if letter not in blocked] for rows in (rows_old, rows_new)]
    assert common[0] == common[1]
