"""Fourier transforms, distances, searches, histograms, and what depends on the order of all elements."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import b, check, f, sample

aten = torch.ops.aten

SAMPLES = [
    sample(aten.histc.default, f(8, 4).clamp(-3, 3), 5, -3, 3, expect="S(0) -> P; S(1) -> P"),
    sample(aten.histc.default, f(8, 4), 5, whole=True),
    sample(aten._cdist_forward.default, f(2, 6, 4), f(2, 8, 4), 2.0, None,
           expect="S(0) S(0) -> S(0); S(1) R -> S(1); R S(1) -> S(2)"),
    sample(aten._cdist_forward.default, f(6, 4), f(2, 8, 4), 2.0, None,
           expect="R S(0) -> S(0); S(0) R -> S(1); R S(1) -> S(2)"),
    sample(aten._cdist_forward.default, f(2, 1, 6, 4), f(4, 8, 4), 1.0, None, expect="S(0) R -> S(0); R S(0) -> S(1)"),
    sample(aten._cdist_backward.default, f(2, 6, 8), f(2, 6, 4), f(2, 8, 4), 2.0, f(2, 6, 8).abs() + 1,
           expect="S(0) S(0) S(0) S(0) -> S(0); S(2) R S(1) S(2) -> P; S(1) S(1) R S(1) -> S(1); R S(2) S(2) R -> S(2)"),
    sample(aten._fft_c2c.default, torch.complex(f(4, 8, 6), f(4, 8, 6)), [1], 0, True,
           expect="S(0) -> S(0); S(2) -> S(2); P -> P"),
    sample(aten._fft_r2c.default, f(4, 8, 6), [1, 2], 0, True, expect="S(0) -> S(0); P -> P"),
    sample(aten._fft_c2r.default, torch.complex(f(4, 5), f(4, 5)), [1], 2, 8, expect="S(0) -> S(0); P -> P"),
    sample(aten.bucketize.Tensor, f(8, 4), f(5).sort().values, expect="S(0) R -> S(0)"),
    sample(aten.searchsorted.Tensor, f(4, 6).sort().values, f(4, 8), expect="S(0) S(0) -> S(0); R S(1) -> S(1)"),
    sample(aten.searchsorted.Tensor, f(6).sort().values, f(4, 8), expect="R S(0) -> S(0)"),
    sample(aten.masked_scatter.default, f(8, 4), b(8, 4), f(8, 4), whole=True, expect="P R P -> P"),
    sample(aten.masked_scatter_backward.default, f(8, 4), torch.arange(32).view(8, 4) % 3 == 0, [11], whole=True),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0 or case.whole
