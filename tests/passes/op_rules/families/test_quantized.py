"""Products of numbers of 8 bits, and rounding to such numbers in training."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import check, f, i, sample

aten = torch.ops.aten


def small(*shape: int) -> torch.Tensor:
    return i(3, *shape, low=-2, dtype=torch.float32).to(torch.float8_e4m3fn)


def scale(*shape: int) -> torch.Tensor:
    return torch.ones(shape) / 2


ZERO_POINT = torch.zeros(6, dtype=torch.int32)
B16 = {"out_dtype": torch.bfloat16}
SPLIT = "S(0) R R R -> S(0); R S(1) R R -> S(1); S(1) S(0) R R -> P"

SCALED_BY_ROW = sample(aten._scaled_mm.default, small(64, 32), small(48, 32).t(), scale(64, 1), scale(1, 48), **B16,
                       expect="S(0) R S(0) R -> S(0); R S(1) R S(1) -> S(1)")

SAMPLES = [
    sample(aten._int_mm.default, i(127, 64, 32, low=-128, dtype=torch.int8), i(127, 32, 48, low=-128, dtype=torch.int8),
           expect="S(0) R -> S(0); R S(1) -> S(1); S(1) S(0) -> P"),
    sample(aten._int_mm.default, i(127, 17, 8, dtype=torch.int8), i(127, 8, 8, dtype=torch.int8), whole=True),
    sample(aten._scaled_mm.default, small(64, 32), small(48, 32).t(), scale(), scale(), **B16, expect=SPLIT),
    SCALED_BY_ROW,
    sample(aten._scaled_mm.default, small(64, 32), small(48, 32).t(), scale(), scale(), f(48, dtype=torch.bfloat16), **B16,
           expect="S(0) R R R R -> S(0); R S(1) R R S(0) -> S(1)"),
    sample(aten.fake_quantize_per_tensor_affine_cachemask.default, f(8, 6), 0.1, 0, -128, 127, expect="S(0) -> S(0) S(0)"),
    sample(aten.fake_quantize_per_tensor_affine.default, f(8, 6), 0.1, 0, -128, 127, expect="S(1) -> S(1)"),
    sample(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, f(8, 6, dtype=torch.float32), scale(1),
           ZERO_POINT[:1], torch.ones(1, dtype=torch.int64), -128, 127, expect="S(0) R R R -> S(0) S(0)"),
    sample(aten._fake_quantize_learnable_per_tensor_affine.default, f(8, 6, dtype=torch.float32), scale(1), scale(1) * 0, -128,
           127, expect="S(0) R R -> S(0)"),
    sample(aten._fake_quantize_learnable_per_tensor_affine_backward.default, f(8, 6, dtype=torch.float32),
           f(8, 6, dtype=torch.float32), scale(1), scale(1) * 0, -128, 127, expect="S(0) S(0) R R -> S(0) P P"),
    sample(aten.fake_quantize_per_channel_affine_cachemask.default, f(8, 6, dtype=torch.float32), scale(6), ZERO_POINT, 1, -128,
           127, expect="S(0) R R -> S(0) S(0); S(1) S(0) S(0) -> S(1) S(1)"),
    sample(aten.fake_quantize_per_channel_affine.default, f(8, 6, dtype=torch.float32), scale(6), ZERO_POINT, 1, -128, 127,
           expect="S(1) S(0) S(0) -> S(1)"),
    sample(aten._fake_quantize_learnable_per_channel_affine.default, f(8, 6, dtype=torch.float32), scale(6), scale(6) * 0, 1,
           -128, 127, expect="S(1) S(0) S(0) -> S(1)"),
    sample(aten._fake_quantize_learnable_per_channel_affine_backward.default, f(8, 6, dtype=torch.float32),
           f(8, 6, dtype=torch.float32), scale(6), scale(6) * 0, 1, -128, 127,
           expect="S(0) S(0) R R -> S(0) P P; S(1) S(1) S(0) S(0) -> S(1) S(0) S(0)"),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    if case is SCALED_BY_ROW and torch.__version__ < (2, 12):
        pytest.skip("on a CPU, torch 2.11 takes one scale for all rows alone")
    assert check(case) > 0 or case.whole
