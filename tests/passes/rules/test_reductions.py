"""Reductions, scans and sorts: sums come out partial, maxima as partial maxima, other reduced dims stay whole."""
from __future__ import annotations

import pytest
import torch

from tests.passes.rules.harness import b, check, f, i, sample

aten, prims = torch.ops.aten, torch.ops.prims

SAMPLES = [
    sample(aten.sum.default, f(8, 6), expect="S(0) -> P; S(1) -> P; P -> P"),
    sample(aten.sum.default, b(8, 6), expect="S(0) -> P"),
    sample(aten.sum.default, i(9, 8), dtype=torch.float64),
    sample(aten.sum.dim_IntList, f(8, 6, 4), [0, -1], expect="S(0) -> P; S(1) -> S(0); S(2) -> P"),
    sample(aten.sum.dim_IntList, f(8, 6, 4), [1], True, expect="S(0) -> S(0); S(1) -> P; S(2) -> S(2)"),
    sample(aten.sum.dim_IntList, f(8, 4), None, expect="S(0) -> P"),
    sample(aten.sum.dim_IntList, f(8, 4), [], True),
    sample(aten.sum.dim_IntList, f(8, 1), [1], True, expect="S(0) -> S(0)"),
    sample(aten.sum.dim_IntList, i(9, 8, 4), [0]),
    sample(aten.sum.dim_IntList, b(8, 4), [0]),
    sample(aten.sum.dim_IntList, f(8, 4, dtype=torch.bfloat16).round(), [1], dtype=torch.float32, expect="P -> P"),
    sample(aten.amax.default, f(8, 6), [0], expect="S(0) -> M; S(1) -> S(0)"),
    sample(aten.amax.default, f(8, 6), [-1], True, expect="S(1) -> M; S(0) -> S(0)"),
    sample(aten.amax.default, f(8, 6), expect="S(0) -> M; S(1) -> M"),
    sample(aten.max.default, f(8, 6), expect="S(0) -> M"),
    sample(aten.any.default, b(8, 4), expect="S(0) -> M"),
    sample(aten.any.dim, b(8, 4), 1, expect="S(0) -> S(0); S(1) -> M"),
    sample(aten.any.dim, f(8, 4), -2, True, expect="S(0) -> M; S(1) -> S(1)"),
    sample(aten.any.dims, b(8, 4, 2), [0, 2], expect="S(1) -> S(0); S(2) -> M"),
    sample(aten.all.dim, b(8, 4), 1, expect="S(0) -> S(0)"),
    sample(aten.all.default, b(8, 4), whole=True),
    sample(aten.all.dims, b(8, 4, 2), [0, 2], True, expect="S(1) -> S(1)"),
    sample(aten.amin.default, f(8, 6), [0], expect="S(1) -> S(0)"),
    sample(aten.min.default, f(8, 4), whole=True),
    sample(aten.prod.default, f(8), whole=True),
    sample(aten.prod.dim_int, f(8, 4), 1, expect="S(0) -> S(0)"),
    sample(aten.mean.default, f(8, 4), whole=True),
    sample(aten.mean.dim, f(8, 4), [1], True, expect="S(0) -> S(0)"),
    sample(aten.var.correction, f(8, 4), [1], correction=0, expect="S(0) -> S(0)"),
    sample(aten.var.correction, f(8, 4), whole=True),
    sample(aten.var_mean.correction, f(8, 4, 6), [0, 2], correction=0, keepdim=True, expect="S(1) -> S(1) S(1)"),
    sample(aten.argmax.default, f(8, 4), 1, expect="S(0) -> S(0)"),
    sample(aten.argmax.default, f(8, 4), -2, True, expect="S(1) -> S(1)"),
    sample(aten.argmax.default, f(8, 4), whole=True),
    sample(aten.argmin.default, f(8, 4), 0, expect="S(1) -> S(0)"),
    sample(aten.max.dim, f(8, 4), -1, expect="S(0) -> S(0) S(0)"),
    sample(aten.min.dim, f(8, 4), 0, True, expect="S(1) -> S(1) S(1)"),
    sample(aten.median.dim, f(8, 4), -1, expect="S(0) -> S(0) S(0)"),
    sample(aten.kthvalue.default, f(8, 4), 2, 0, expect="S(1) -> S(0) S(0)"),
    sample(aten.logsumexp.default, f(8, 4), [1], expect="S(0) -> S(0)"),
    sample(aten.linalg_vector_norm.default, f(8, 4), 2, [1], True, expect="S(0) -> S(0)"),
    sample(aten.linalg_vector_norm.default, f(8, 4), 2, whole=True),
    sample(aten.cumsum.default, f(8, 6), 1, expect="S(0) -> S(0); P -> P"),
    sample(aten.cumsum.default, b(8, 6), -1, expect="S(0) -> S(0)"),
    sample(aten.cumsum.default, f(), 0, whole=True),
    sample(aten.cumprod.default, f(8, 6), 0, expect="S(1) -> S(1)"),
    sample(aten.logcumsumexp.default, f(8, 6), 1, expect="S(0) -> S(0)"),
    sample(aten.cummax.default, f(8, 6), 1, expect="S(0) -> S(0) S(0)"),
    sample(aten.cummin.default, f(8, 6), 0, expect="S(1) -> S(1) S(1)"),
    sample(aten._softmax.default, f(8, 6), -1, False, expect="S(0) -> S(0)"),
    sample(aten._log_softmax.default, f(8, 6, 2), 1, False, expect="S(0) -> S(0); S(2) -> S(2)"),
    sample(aten._softmax_backward_data.default, f(8, 6), f(8, 6), -1, torch.float64, expect="S(0) S(0) -> S(0); P R -> P"),
    sample(aten._log_softmax_backward_data.default, f(8, 6), f(8, 6), 1, torch.float64, expect="S(0) S(0) -> S(0)"),
    sample(aten.sort.default, f(8, 6), expect="S(0) -> S(0) S(0)"),
    sample(aten.sort.default, f(8, 6), 0, True, expect="S(1) -> S(1) S(1)"),
    sample(aten.sort.default, f(8), whole=True),
    sample(aten.sort.stable, i(3, 8, 6), stable=True, dim=0, descending=True, expect="S(1) -> S(1) S(1)"),
    sample(aten.topk.default, f(8, 6), 2, expect="S(0) -> S(0) S(0)"),
    sample(aten.topk.default, f(8, 6), 2, 0, expect="S(1) -> S(1) S(1)"),
    sample(aten.flip.default, f(8, 6), [0], expect="S(1) -> S(1); P -> P"),
    sample(prims.rev.default, f(8, 6), [1], expect="S(0) -> S(0); P -> P"),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0 or case.whole
