"""Matrix products: rows and columns split, a split inner dim leaves partial sums."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import check, f, i, sample

aten = torch.ops.aten

SAMPLES = [
    sample(aten.mm.default, f(8, 12), f(12, 4), expect="S(0) R -> S(0); R S(1) -> S(1); S(1) S(0) -> P; P R -> P; R P -> P"),
    sample(aten.mm.default, f(8, 16), f(16, 8), expect="S(1.1) S(0.1) -> P; S(0.1) R -> S(0.1)"),
    sample(aten.mm.default, f(8, 1), f(1, 8)),
    sample(aten.mm.default, f(8, 8, dtype=torch.bfloat16).round(), f(8, 4, dtype=torch.bfloat16).round()),
    sample(aten.mm.default, i(9, 4, 6), i(9, 6, 4)),
    sample(aten.bmm.default, f(4, 6, 8), f(4, 8, 2),
           expect="S(0) S(0) -> S(0); S(1) R -> S(1); R S(2) -> S(2); S(2) S(1) -> P; P R -> P; R P -> P"),
    sample(aten.addmm.default, f(4), f(8, 12), f(12, 4),
           expect="P S(1) S(0) -> P; S(0) R S(1) -> S(1); R S(0) R -> S(0); P P R -> P; P R P -> P"),
    sample(aten.addmm.default, f(8, 4), f(8, 12), f(12, 4), expect="S(0) S(0) R -> S(0)"),
    sample(aten.addmm.default, f(1, 4), f(8, 12), f(12, 4), beta=2, alpha=0.5, expect="R S(0) R -> S(0)"),
    sample(aten.addmm.default, f(8, 1), f(8, 12), f(12, 4), expect="S(0) S(0) R -> S(0); R R S(1) -> S(1)"),
    sample(aten.addmm.default, f(1), f(8, 12), f(12, 4)),
    sample(aten.addmm.default, f(), f(8, 12), f(12, 4), expect="R S(0) R -> S(0); P S(1) S(0) -> P"),
    sample(aten.baddbmm.default, f(4, 6, 2), f(4, 6, 8), f(4, 8, 2), expect="P S(2) S(1) -> P; S(0) S(0) S(0) -> S(0)"),
    sample(aten.baddbmm.default, f(1, 6, 1), f(4, 6, 8), f(4, 8, 2), beta=0.5, expect="R S(0) S(0) -> S(0)"),
    sample(aten.baddbmm.default, f(2), f(4, 6, 8), f(4, 8, 2), expect="S(0) R S(2) -> S(2); R S(0) S(0) -> S(0)"),
    sample(aten.mv.default, f(8, 6), f(6), expect="S(0) R -> S(0); S(1) S(0) -> P"),
    sample(aten.dot.default, f(8), f(8), expect="S(0) S(0) -> P"),
    sample(aten._trilinear.default, f(4, 6), f(4, 6, 8), f(4, 8), [1, 3], [0], [1, 2], [2, 3],
           expect="S(0) R S(0) -> S(0); R S(0) R -> S(1); S(1) S(1) R -> P; R S(2) S(1) -> P; P R R -> P"),
    sample(aten._trilinear.default, f(4, 6), f(4, 4), f(4, 8), [1, 3], [2, 3], [1, 2], [0]),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0
