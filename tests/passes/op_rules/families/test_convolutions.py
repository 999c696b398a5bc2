"""Convolutions and pooling: batch, channels and groups split; space stays whole."""
from __future__ import annotations

import pytest
import torch

from tests.passes.op_rules.families.harness import check, f, i, sample

aten, prims = torch.ops.aten, torch.ops.prims


def conv(x, w, bias=None, *, stride=1, padding=0, transposed=False, groups=1, **options):
    n = x.ndim - 2
    return sample(aten.convolution.default, x, w, bias, [stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups,
                  **options)


def backward(grad, x, w, bias=None, *, mask=(True, True, False), stride=1, padding=0, transposed=False, groups=1, **options):
    n = x.ndim - 2
    return sample(aten.convolution_backward.default, grad, x, w, bias, [stride] * n, [padding] * n, [1] * n, transposed,
                  [0] * n, groups, list(mask), **options)


FORWARD = [
    conv(f(4, 6, 5, 5), f(8, 6, 3, 3), expect="S(0) R -> S(0); R S(0) -> S(1); S(1) S(1) -> P; P R -> P; R P -> P"),
    conv(f(4, 6, 5, 5), f(8, 6, 3, 3), f(8), padding=1, stride=2,
         expect="S(0) R R -> S(0); R S(0) S(0) -> S(1); S(1) S(1) P -> P; P R P -> P"),
    conv(f(4, 6, 9), f(8, 6, 3), f(8), expect="S(0) R R -> S(0); R S(0) S(0) -> S(1); S(1) S(1) P -> P"),
    conv(f(2, 4, 3, 3, 3), f(4, 4, 2, 2, 2), expect="S(0) R -> S(0); R S(0) -> S(1); S(1) S(1) -> P"),
    conv(f(4, 6, 5, 5), f(6, 8, 3, 3), f(8), transposed=True, stride=2,
         expect="S(0) R R -> S(0); R S(1) S(0) -> S(1); S(1) S(0) P -> P"),
    conv(f(4, 8, 5, 5), f(8, 1, 3, 3), f(8), groups=8, expect="S(0) R R -> S(0); S(1) S(0) S(0) -> S(1)"),
    conv(f(4, 4, 5), f(16, 1, 3), f(16), groups=4,  # four outputs per channel
         expect="S(0) R R -> S(0); S(1) S(0) S(0) -> S(1); R S(0.1) S(0.1) -> S(1.1)"),
    conv(f(4, 8, 5, 5), f(8, 4, 3, 3), f(8), groups=2,
         expect="S(1) S(0) S(0) -> S(1); R S(0.1) S(0.1) -> S(1.1); S(1.1) S(1) P -> P"),
    conv(f(4, 8, 5), f(8, 4, 3), f(16), transposed=True, groups=4,
         expect="S(1) S(0) S(0) -> S(1); R S(1) S(0.1) -> S(1.1); S(1.1) S(0.1) P -> P"),
]
BACKWARD = [
    backward(f(4, 8, 3, 3), f(4, 6, 5, 5), f(8, 6, 3, 3),
             expect="S(0) S(0) R -> S(0) P; S(1) R S(0) -> P S(0); R S(1) S(1) -> S(1) S(1); P R R -> P P"),
    backward(f(4, 8, 3, 3), f(4, 6, 5, 5), f(8, 6, 3, 3), [8], mask=(True, True, True),
             expect="S(0) S(0) R -> S(0) P P; S(1) R S(0) -> P S(0) S(0); R S(1) S(1) -> S(1) S(1) R; P R R -> P P P"),
    backward(f(4, 8, 3, 3), f(4, 6, 5, 5), f(8, 6, 3, 3), [8], mask=(False, True, True),
             expect="S(0) S(0) R -> P P; S(1) R S(0) -> S(0) S(0); R S(1) S(1) -> S(1) R"),
    backward(f(4, 8, 3, 3), f(4, 6, 5, 5), f(8, 6, 3, 3), [8], mask=(False, False, True), expect="S(1) R S(0) -> S(0)"),
    backward(f(4, 8, 7), f(4, 6, 9), f(8, 6, 3), mask=(True, False, False), expect="S(1) R S(0) -> P"),
    backward(f(2, 4, 2, 2, 2), f(2, 4, 3, 3, 3), f(4, 4, 2, 2, 2), expect="S(0) S(0) R -> S(0) P"),
    backward(f(4, 8, 11, 11), f(4, 6, 5, 5), f(6, 8, 3, 3), [8], mask=(True, True, True), stride=2, transposed=True,
             expect="S(0) S(0) R -> S(0) P P; S(1) R S(1) -> P S(1) S(0); R S(1) S(0) -> S(1) S(0) R"),
    backward(f(4, 8, 3, 3), f(4, 8, 5, 5), f(8, 1, 3, 3), [8], mask=(True, True, True), groups=8,
             expect="S(1) S(1) S(0) -> S(1) S(0) S(0); S(0) S(0) R -> S(0) P P"),
    backward(f(4, 16, 3), f(4, 4, 5), f(16, 1, 3), groups=4,
             expect="S(1) S(1) S(0) -> S(1) S(0); S(1.1) R S(0.1) -> P S(0.1)"),
    backward(f(4, 8, 3, 3), f(4, 8, 5, 5), f(8, 4, 3, 3), [8], mask=(True, True, True), groups=2,
             expect="S(1) S(1) S(0) -> S(1) S(0) S(0); S(1.1) R S(0.1) -> P S(0.1) S(0.1); "
                    "R S(1.1) S(1) -> S(1.1) S(1) R"),
    backward(f(4, 16, 7), f(4, 8, 5), f(8, 4, 3), [16], mask=(True, True, True), transposed=True, groups=4,
             expect="S(1) S(1) S(0) -> S(1) S(0) S(0); S(1.1) R S(1) -> P S(1) S(0.1)"),
]
ANTIALIASED = [kind for kind in ("bilinear", "bicubic", "lanczos") if hasattr(aten, f"_upsample_{kind}2d_aa")]
BOTH = "S(0) -> S(0); S(1) -> S(1)"
_x, _indices = f(4, 6, 8, 8), torch.ops.aten.max_pool2d_with_indices(f(4, 6, 8, 8), [2, 2])[1]
_x3 = f(2, 4, 4, 4, 4)
_indices3 = torch.ops.aten.max_pool3d_with_indices(_x3, [2, 2, 2])[1]
POOLS = [
    sample(aten.max_pool2d_with_indices.default, _x, [3, 3], [2, 2], [1, 1], expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(aten.max_pool2d_with_indices_backward.default, f(4, 6, 4, 4), _x, [2, 2], [2, 2], [0, 0], [1, 1], False, _indices,
           expect="S(0) S(0) S(0) -> S(0); S(1) S(1) S(1) -> S(1); P R R -> P"),
    sample(aten.max_pool2d_with_indices.default, f(6, 8, 8), [2, 2], expect="S(0) -> S(0) S(0)"),
    sample(aten.max_pool3d_with_indices.default, _x3, [2, 2, 2], expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(aten.max_pool3d_with_indices_backward.default, f(2, 4, 2, 2, 2), _x3, [2, 2, 2], [], [0, 0, 0], [1, 1, 1], False,
           _indices3, expect="S(1) S(1) S(1) -> S(1); P R R -> P"),
    sample(prims._low_memory_max_pool_with_offsets.default, _x, [2, 2], [2, 2], [0, 0], [1, 1], False,
           expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(prims._low_memory_max_pool_with_offsets.default, _x3, [2, 1, 1], [2, 1, 1], [0] * 3, [1] * 3, False,
           expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    sample(prims._low_memory_max_pool_offsets_to_indices.default,
           torch.ops.prims._low_memory_max_pool_with_offsets(_x, [2, 2], [2, 2], [0, 0], [1, 1], False)[1],
           [2, 2], [8, 8], [2, 2], [0, 0], [1, 1], expect=BOTH),
    sample(prims._low_memory_max_pool_offsets_to_indices.default,
           torch.ops.prims._low_memory_max_pool_with_offsets(_x3, [2, 1, 1], [2, 1, 1], [0] * 3, [1] * 3, False)[1],
           [2, 1, 1], [4, 4, 4], [2, 1, 1], [0] * 3, [1] * 3, expect=BOTH),
    sample(aten.avg_pool2d.default, _x, [3, 3], [2, 2], [1, 1], False, False, expect=BOTH + "; P -> P"),
    sample(aten.avg_pool2d_backward.default, f(4, 6, 4, 4), _x, [2, 2], [2, 2], [0, 0], False, True, None,
           expect="S(0) S(0) -> S(0); S(1) S(1) -> S(1); P R -> P"),
    sample(aten.avg_pool3d.default, _x3, [2, 2, 2], expect=BOTH + "; P -> P"),
    sample(aten.avg_pool3d_backward.default, f(2, 4, 2, 2, 2), _x3, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None,
           expect="S(1) S(1) -> S(1); P R -> P"),
    sample(aten._adaptive_avg_pool2d.default, _x, [3, 3], expect=BOTH + "; P -> P"),
    sample(aten._adaptive_avg_pool2d_backward.default, f(4, 6, 3, 3), _x, expect="S(0) S(0) -> S(0); P R -> P"),
    sample(aten._adaptive_avg_pool3d.default, _x3, [3, 3, 3], expect=BOTH + "; P -> P"),
    sample(aten._adaptive_avg_pool3d_backward.default, f(2, 4, 3, 3, 3), _x3, expect="S(0) S(0) -> S(0); P R -> P"),
    sample(aten.upsample_nearest1d.default, f(4, 6, 8), [16], expect=BOTH + "; P -> P"),
    sample(aten.upsample_nearest2d.default, _x, [16, 16], expect=BOTH + "; P -> P"),
    sample(aten.upsample_nearest3d.default, _x3, [8, 8, 8], expect=BOTH + "; P -> P"),
    sample(aten.upsample_bilinear2d.default, _x, [12, 12], False, expect=BOTH + "; P -> P"),
    sample(aten.upsample_bicubic2d.default, _x, [12, 12], False, expect=BOTH + "; P -> P"),
    sample(aten.upsample_linear1d.default, f(4, 6, 8), [12], False, expect=BOTH + "; P -> P"),
    sample(aten.upsample_trilinear3d.default, _x3, [6, 6, 6], False, expect=BOTH + "; P -> P"),
    sample(aten.upsample_nearest1d_backward.default, f(4, 6, 16), [16], [4, 6, 8], expect=BOTH + "; P -> P"),
    sample(aten.upsample_nearest2d_backward.default, f(4, 6, 16, 16), [16, 16], [4, 6, 8, 8], expect=BOTH + "; P -> P"),
    sample(aten.upsample_nearest3d_backward.default, f(2, 4, 8, 8, 8), [8, 8, 8], [2, 4, 4, 4, 4], expect=BOTH + "; P -> P"),
    sample(aten.upsample_bilinear2d_backward.default, f(4, 6, 12, 12), [12, 12], [4, 6, 8, 8], False,
           expect=BOTH + "; P -> P"),
    sample(aten.upsample_linear1d_backward.default, f(4, 6, 12), [12], [4, 6, 8], False, expect=BOTH + "; P -> P"),
    *(sample(getattr(aten, f"_upsample_{kind}2d_aa").default, _x, [12, 12], False, expect=BOTH + "; P -> P")
      for kind in ANTIALIASED),
    *(sample(getattr(aten, f"_upsample_{kind}2d_aa_backward").default, f(4, 6, 12, 12), [12, 12], [4, 6, 8, 8], False,
             expect=BOTH + "; P -> P") for kind in ANTIALIASED),
    sample(aten._upsample_bilinear2d_aa.default, i(255, 4, 6, 8, 8, dtype=torch.uint8), [5, 5], False, expect=BOTH),
    sample(aten.upsample_bilinear2d.default, i(255, 4, 6, 8, 8, dtype=torch.uint8), [5, 5], False, expect=BOTH),
    sample(aten.avg_pool2d.default, i(99, 4, 6, 8, 8), [2, 2], expect=BOTH),
    sample(aten.upsample_nearest2d.default, i(255, 4, 6, 8, 8, dtype=torch.uint8), [12, 12], expect=BOTH),
    sample(aten.upsample_bicubic2d_backward.default, f(4, 6, 12, 12), [12, 12], [4, 6, 8, 8], False,
           expect=BOTH + "; P -> P"),
    sample(aten.upsample_trilinear3d_backward.default, f(2, 4, 6, 6, 6), [6, 6, 6], [2, 4, 4, 4, 4], False,
           expect=BOTH + "; P -> P"),
    sample(aten._weight_norm_interface.default, f(8, 4, 2), f(8, 1, 1), 0, expect="S(0) S(0) -> S(0) S(0)"),
    sample(aten._weight_norm_interface_backward.default, f(8, 4, 2), f(8, 4, 2), f(8, 1, 1), f(8, 1, 1).abs() + 1, 0,
           expect="S(0) S(0) S(0) S(0) -> S(0) S(0); P R R R -> P P"),
    sample(aten._weight_norm_interface_backward.default, f(8, 4, 2), f(8, 4, 2), f(1, 1, 2), f(1, 1, 2).abs() + 1, 2,
           expect="S(2) S(2) S(2) S(2) -> S(2) S(2)"),
]
EXACT = [
    case
    for n, x in ((1, f(4, 6, 8)), (2, _x), (3, _x3))
    for case in (
        sample(getattr(aten, f"_upsample_nearest_exact{n}d").default, x, [6] * n, expect=BOTH + "; P -> P"),
        sample(getattr(aten, f"_upsample_nearest_exact{n}d_backward").default, f(*x.shape[:2], *[6] * n), [6] * n,
               list(x.shape), expect=BOTH + "; P -> P"),
    )
]
BORDERS = [
    case
    for n, x in ((1, f(4, 6, 8)), (2, _x), (3, _x3))
    for kind in ("reflection", "replication")
    for case in (
        sample(getattr(aten, f"{kind}_pad{n}d").default, x, [1, 2] * n, expect=BOTH + "; P -> P"),
        sample(getattr(aten, f"{kind}_pad{n}d_backward").default, f(*x.shape[:2], *(s + 3 for s in x.shape[2:])), x,
               [1, 2] * n, expect="S(0) S(0) -> S(0); S(1) S(1) -> S(1); P R -> P"),
    )
]
ADAPTIVE = [
    case
    for n, x in ((2, _x), (3, _x3))
    for case in (
        sample(getattr(aten, f"adaptive_max_pool{n}d").default, x, [2] * n, expect="S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
        sample(getattr(aten, f"adaptive_max_pool{n}d_backward").default, f(*x.shape[:2], *[2] * n), x,
               getattr(aten, f"adaptive_max_pool{n}d")(x, [2] * n)[1],
               expect="S(0) S(0) S(0) -> S(0); S(1) S(1) S(1) -> S(1); P R R -> P"),
    )
]
SAMPLES = FORWARD + BACKWARD + POOLS + EXACT + BORDERS + ADAPTIVE


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0
