"""Table look-ups and their gradients, with the table, the indices or the rows split."""
from __future__ import annotations

import pytest
import torch

from tests.passes.rules.harness import b, check, f, i, permutation, sample

aten = torch.ops.aten

LOOKUPS = [
    sample(aten.embedding.default, f(12, 8), i(12, 4, 6),
           expect="S(0) R -> P; S(1) R -> S(2); R S(0) -> S(0); R S(1) -> S(1); P R -> P"),
    sample(aten.embedding.default, f(12, 8), i(12, 4), 0, False, False, expect="S(0) R -> P"),
    sample(aten.embedding.default, f(12, 8), i(12), expect="S(0) R -> P; S(1) R -> S(0)"),
    sample(aten.embedding_dense_backward.default, f(4, 6, 8), i(12, 4, 6), 12, -1, False,
           expect="S(0) S(0) -> P; S(1) S(1) -> P; S(2) R -> S(1); P R -> P"),
    sample(aten.embedding_dense_backward.default, f(4, 6, 8), i(12, 4, 6), 12, 0, False, expect="S(0) S(0) -> P"),
    sample(aten.embedding_dense_backward.default, f(4, 6, 8), i(12, 4, 6), 12, -1, True, expect="S(2) R -> S(1)"),
    sample(aten._embedding_bag.default, f(12, 8), i(12, 20), torch.arange(0, 20, 5), expect="S(1) R R -> S(1) R R R"),
    sample(aten._embedding_bag.default, f(12, 8), i(12, 20), torch.arange(0, 20, 5), False, 1,
           expect="S(1) R R -> S(1) R R R"),
    sample(aten._embedding_bag.default, f(12, 8), i(12, 20), torch.arange(0, 20, 5), False, 0, False, f(20),
           expect="S(1) R R R -> S(1) R R R"),
    sample(aten._embedding_bag.default, f(12, 8), i(12, 20), torch.arange(0, 20, 5), False, 2, whole=True),
    sample(aten._embedding_bag_forward_only.default, f(12, 8), i(12, 20), torch.arange(0, 20, 5),
           expect="S(1) R R -> S(1) R R R"),
    sample(aten._embedding_bag_backward.default, f(4, 8), i(12, 20), torch.arange(0, 20, 5),
           torch.arange(4).repeat_interleave(5), torch.full((4,), 5), torch.zeros(4, dtype=torch.int64), 12, False, 0, False,
           None, expect="S(1) R R R R R -> S(1); P R R R R R -> P"),
]
INDEX = [
    sample(aten.index.Tensor, f(12, 8), [i(12, 6)], expect="S(0) R -> P; S(1) R -> S(1); R S(0) -> S(0); P R -> P"),
    sample(aten.index.Tensor, f(12, 8), [i(12, 6, low=-12)], expect="S(0) R -> P"),
    sample(aten.index.Tensor, f(4, 12, 8), [None, i(12, 6, 2, low=-12)],
           expect="S(1) R -> P; S(0) R -> S(0); S(2) R -> S(3); R S(0) -> S(1); R S(1) -> S(2)"),
    sample(aten.index.Tensor, i(9, 12), [i(12, 6)], expect="S(0) R -> P"),
    sample(aten.index.Tensor, b(12, 4), [i(12, 6)], expect="S(0) R -> P"),
    sample(aten.index.Tensor, f(6, 8), [i(6, 4, 1, 1), i(8, 1, 1, 8)], expect="R S(0) R -> S(0); R R S(2) -> S(2)"),
    sample(aten.index.Tensor, f(4, 6, 8, 2), [None, i(6, 4, 1), i(8, 8)],
           expect="R S(0) R -> S(1); R R S(0) -> S(2); S(0) R R -> S(0); S(3) R R -> S(3)"),
    sample(aten.index.Tensor, f(4, 6, 8), [i(4, 6), i(6, 6)], expect="R S(0) S(0) -> S(0); S(2) R R -> S(1)"),
    sample(aten.index.Tensor, f(4, 6, 8), [i(4, 6), None, i(8, 6)], whole=True),
    sample(aten.index.Tensor, f(12, 8), [torch.tensor(3)], expect="S(0) R -> P; S(1) R -> S(0)"),
    sample(aten._unsafe_index.Tensor, f(2, 4, 6, 8), [None, None, i(6, 12, 1), i(8, 16)],
           expect="S(0) R R -> S(0); S(1) R R -> S(1); R S(0) R -> S(2); R R S(0) -> S(3)"),
    sample(aten._unsafe_masked_index.default, f(12, 8), b(6, 1), [i(12, 6)], 0, expect="R S(0) S(0) -> S(0); P R R -> P"),
    sample(aten._unsafe_masked_index.default, f(2, 6, 8), b(4, 4), [None, i(6, 4, 1), i(8, 4)], 2.0,
           expect="S(0) R R R -> S(0); R S(0) S(0) R -> S(1)"),
    sample(aten.index_select.default, f(4, 12, 8), 1, i(12, 6), expect="S(1) R -> P; S(0) R -> S(0); R S(0) -> S(1); P R -> P"),
    sample(aten.index_select.default, f(12), 0, i(12, 6), expect="S(0) R -> P"),
    sample(aten.gather.default, f(8, 12), 1, i(12, 8, 6), expect="S(0) S(0) -> S(0); S(1) R -> P; R S(1) -> S(1); P R -> P"),
    sample(aten.gather.default, f(8, 12), -2, i(8, 4, 12), expect="S(1) S(1) -> S(1); S(0) R -> P; R S(0) -> S(0)"),
    sample(aten.gather.default, f(8, 12), 0, i(8, 4, 6), expect="S(0) R -> P; R S(0) -> S(0)"),
    sample(aten.gather.default, f(8, 12), 1, i(12, 4, 6), expect="S(1) R -> P; R S(1) -> S(1)"),
    sample(aten.gather.default, i(9, 8, 12), 1, i(12, 8, 1), expect="S(1) R -> P"),
    sample(aten.gather.default, f(12), 0, i(12, 8), expect="S(0) R -> P; R S(0) -> S(0)"),
]
PUT = [
    sample(aten.index_put.default, f(12, 8), [i(12, 6)], f(6, 8), True,
           expect="S(0) R R -> S(0); S(1) R S(1) -> S(1); P S(0) S(0) -> P; P R P -> P"),
    sample(aten.index_put.default, f(12, 8), [i(12, 6, low=-12)], f(6, 8), True, expect="S(0) R R -> S(0)"),
    sample(aten.index_put.default, f(12, 8), [i(12, 6)], f(8), True, expect="S(0) R R -> S(0); P S(0) R -> P"),
    sample(aten.index_put.default, f(12, 8), [i(12, 6)], f(6, 1), True, expect="S(0) R R -> S(0); P S(0) S(0) -> P"),
    sample(aten.index_put.default, f(12, 8), [i(12, 6)], f(), True, expect="S(0) R R -> S(0); P S(0) R -> P"),
    sample(aten.index_put.default, f(12, 8), [i(12, 4, 6)], f(4, 6, 8), True,
           expect="S(0) R R -> S(0); P S(1) S(1) -> P; P S(0) S(0) -> P"),
    sample(aten.index_put.default, f(4, 12, 8), [None, i(12, 6)], f(4, 6, 8), True,
           expect="S(1) R R -> S(1); S(0) R S(0) -> S(0); P S(0) S(1) -> P"),
    sample(aten.index_put.default, f(4, 12, 8), [None, i(12, 6)], f(6, 8), True, expect="S(1) R R -> S(1); S(0) R R -> S(0)"),
    sample(aten.index_put.default, f(4, 5, 5), [None, i(5, 10), i(5, 10)], f(4, 10), True,
           expect="S(0) R R S(0) -> S(0); P S(0) S(0) S(1) -> P"),
    sample(aten.index_put.default, f(12, 8), [permutation(12)], f(12, 8), expect="S(1) R S(1) -> S(1)"),
    sample(aten.index_put.default, f(12), [permutation(12)], f(12), whole=True),
    sample(aten.index_put.default, f(8, 4), [b(8, 4)], f(), expect="S(0) S(0) R -> S(0); S(1) S(1) R -> S(1); P R P -> P"),
    sample(aten.index_put.default, f(8, 4, 6), [None, b(4)], f(8, 1, 6), True,
           expect="S(0) R S(0) -> S(0); S(1) S(0) R -> S(1); S(2) R S(2) -> S(2)"),
    sample(aten.index_put.default, f(8, 4), [b(8)], f(4), expect="S(0) S(0) R -> S(0); S(1) R S(0) -> S(1)"),
    sample(aten.index_put.default, f(8, 4), [torch.arange(8) < 3], f(3, 4), whole=True),
    sample(aten.index_put.default, f(12, 8), [torch.tensor(5)], f(8), True, expect="S(0) R R -> S(0); S(1) R S(0) -> S(1)"),
    sample(aten._unsafe_index_put.default, f(2, 4, 6, 8), [None, None, i(6, 12, 1), i(8, 16)], f(2, 4, 12, 16), True,
           expect="S(0) R R S(0) -> S(0); S(1) R R S(1) -> S(1); P S(0) R S(2) -> P; P R S(0) S(3) -> P"),
    sample(aten._unsafe_masked_index_put_accumulate.default, f(12, 8), b(4, 6, 1), [i(12, 4, 6)], f(4, 6, 8),
           expect="S(0) R R R -> S(0); S(1) R R S(2) -> S(1); P S(0) S(0) S(0) -> P; P S(1) S(1) S(1) -> P; P R R P -> P"),
    sample(aten._unsafe_masked_index_put_accumulate.default, f(12, 8), b(4, 1), [i(12, 4)], f(4, 8),
           expect="S(0) R R R -> S(0); P S(0) S(0) S(0) -> P"),
    sample(aten._unsafe_masked_index_put_accumulate.default, f(12, 8), b(8), [i(12, 4)], f(4, 8),
           expect="S(0) R R R -> S(0); S(1) S(0) R S(1) -> S(1); P R S(0) S(0) -> P"),
    sample(aten._unsafe_masked_index_put_accumulate.default, f(12), b(8), [i(12, 8)], f(8),
           expect="S(0) R R R -> S(0); P S(0) S(0) S(0) -> P"),
    sample(aten._unsafe_masked_index_put_accumulate.default, f(2, 6, 8), b(4, 4), [None, i(6, 4, 1), i(8, 4)], f(2, 4, 4),
           expect="S(0) R R R S(0) -> S(0); P S(0) S(0) R S(1) -> P"),
]
SCATTER = [
    sample(aten.scatter.value, f(8, 12), 1, i(12, 8, 3), 2.5, expect="S(0) S(0) -> S(0); S(1) R -> S(1)"),
    sample(aten.scatter.value, f(8, 12), 0, i(8, 3, 12), 2.5, expect="S(1) S(1) -> S(1); S(0) R -> S(0)"),
    sample(aten.scatter.src, f(12, 8), 0, torch.stack([permutation(12)[:6] for _ in range(8)], 1), f(6, 8),
           expect="S(0) R R -> S(0); S(1) S(1) S(1) -> S(1); P R P -> P"),
    sample(aten.scatter.src, f(12, 8), 1, torch.stack([permutation(8)[:4] for _ in range(12)]), f(12, 6),
           expect="S(1) R R -> S(1); S(0) S(0) S(0) -> S(0)"),
    sample(aten.scatter_add.default, f(12, 8), 0, i(12, 6, 8), f(6, 8),
           expect="S(0) R R -> S(0); S(1) S(1) S(1) -> S(1); P S(0) S(0) -> P; P R P -> P"),
    sample(aten.scatter_add.default, f(12, 8), 0, i(12, 6, 4), f(6, 8), expect="S(0) R R -> S(0); P S(0) S(0) -> P"),
    sample(aten.scatter_add.default, f(12), -1, i(12, 6), f(8), expect="S(0) R R -> S(0)"),
    sample(aten.scatter_add.default, f(12), 0, i(12, 6), f(6), expect="S(0) R R -> S(0); P S(0) S(0) -> P"),
    sample(aten.scatter_reduce.two, f(12, 8), 0, i(12, 6, 8), f(6, 8), "amax",
           expect="S(1) S(1) S(1) -> S(1); S(0) R R -> S(0)"),
    sample(aten.scatter_reduce.two, f(12, 8), 0, i(12, 6, 8), f(6, 8), "sum",
           expect="S(1) S(1) S(1) -> S(1); S(0) R R -> S(0); P S(0) S(0) -> P; P R P -> P"),
    sample(aten.scatter_reduce.two, f(12, 8), 0, i(12, 6, 8), f(6, 8), "prod", expect="S(0) R R -> S(0)"),
    sample(aten.scatter_reduce.two, f(12, 8), 0, i(12, 6, 8), f(6, 8), "mean", include_self=False,
           expect="S(0) R R -> S(0); S(1) S(1) S(1) -> S(1)"),
    sample(aten.index_add.default, f(12, 8), 0, i(12, 6), f(6, 8),
           expect="S(0) R R -> S(0); S(1) R S(1) -> S(1); P S(0) S(0) -> P; P R P -> P"),
    sample(aten.index_add.default, f(4, 12), 1, i(12, 6), f(4, 6), alpha=2, expect="S(1) R R -> S(1); S(0) R S(0) -> S(0)"),
]
SAMPLES = LOOKUPS + INDEX + PUT + SCATTER


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0 or case.whole
