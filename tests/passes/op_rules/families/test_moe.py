"""Products with one matrix per group of rows: columns of the experts' matrices split."""
from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # registers its grouped product for devices without a kernel

from tests.passes.op_rules.families.harness import Run, check, f, i, sample

aten = torch.ops.aten
FALLBACK = torch.ops.transformers.grouped_mm_fallback.default
BACKWARD = [getattr(torch.ops.transformers, name).default for name in ("grouped_mm_fallback_backward",)
            if hasattr(torch.ops.transformers, name)]  # not in every release
ENDS = torch.tensor([3, 3, 10, 16], dtype=torch.int32)
ALIGNED = torch.tensor([8, 8, 24, 32], dtype=torch.int32)


def grouped(a, b, ends=None, bias=None, out_dtype=None):
    """What `_grouped_mm` computes, in any dtype."""
    if ends is None:
        return a @ b
    starts = [0, *ends.tolist()]
    spans = list(zip(starts, starts[1:]))
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in spans])
    if b.ndim == 3:
        return torch.cat([a[s:e] @ w for (s, e), w in zip(spans, b)])
    return torch.cat([w @ b[:, s:e] for (s, e), w in zip(spans, a)], 1)


SAMPLES = [
    sample(FALLBACK, f(16, 8), f(4, 8, 12), ENDS, expect="R S(2) R -> S(1); S(1) S(1) R -> P; P R R -> P; R P R -> P"),
    *(sample(each, f(16, 8), f(4, 8, 12), ENDS, f(16, 12),
             expect="S(1) S(1) R R -> S(1) S(1); R S(2) R S(1) -> P S(2); R R R P -> P P") for each in BACKWARD),
]


def r(*shape: int) -> torch.Tensor:
    """Small whole numbers, so that bfloat16 is exact."""
    return i(3, *shape, low=-2, dtype=torch.bfloat16)


KERNEL = [
    sample(aten._grouped_mm.default, r(32, 32), r(4, 32, 64), ALIGNED, stand_in=grouped,
           expect="R S(2) R -> S(1); S(1) S(1) R -> P; P R R -> P; R P R -> P"),
    sample(aten._grouped_mm.default, r(32, 32), r(32, 64), ALIGNED, stand_in=grouped,
           expect="S(0) R R -> S(1); R S(1) R -> S(2); P R R -> P"),
    sample(aten._grouped_mm.default, r(4, 16, 32), r(32, 32), ALIGNED, stand_in=grouped,
           expect="S(1) R R -> S(0); S(2) S(0) R -> P; R P R -> P"),
    sample(aten._grouped_mm.default, r(4, 16, 32), r(4, 32, 16), stand_in=grouped,
           expect="S(0) S(0) -> S(0); S(1) R -> S(1); R S(2) -> S(2); S(2) S(1) -> P"),
]
SAMPLES += KERNEL


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0


def test_parts_of_a_grouped_product_keep_the_alignment_of_the_kernel():
    """Runs of 16 bytes: 24 columns of bfloat16 are 3 runs, which no axis of 2 divides."""
    case = sample(aten._grouped_mm.default, r(32, 32), r(4, 32, 24), ALIGNED, stand_in=grouped)
    run = Run(case)
    factors = run.factors(finer=False)
    assert factors[1][2] == (3, 8)
    assert "R S(2.1) R -> S(1.1)" not in run.check()


@pytest.mark.gpu
@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_the_stand_in_computes_what_the_kernel_does(case):
    made = case.target(*(x.cuda() for x in case.args))
    torch.testing.assert_close(made.cpu(), grouped(*case.args))
