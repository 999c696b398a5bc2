"""Which operations make rows depend on each other: small graphs before -> names after."""
from __future__ import annotations

from passes.analyses.cross_sample_ops import mixing_operations
from tests.passes.graphs import Builder, V, aten


def names(b: Builder, *values: int) -> list[str]:
    graph = b.finish(list(values))
    return [op.target for op in graph.operations if op.name in mixing_operations(graph)]


def test_a_mean_over_rows_that_no_row_reads_mixes_nothing():
    b = Builder()
    x, w = b.input((4, 8)), b.input((8, 16), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    assert names(b, b.call(aten.sum.dim_IntList, V(y), [0, 1])) == []


def test_statistics_over_rows_that_rows_read_mix_them():
    b = Builder()
    x = b.input((4, 8))
    total = b.call(aten.sum.dim_IntList, V(x), [0], True)
    (found,) = names(b, b.call(aten.sub.Tensor, V(x), V(total)))
    assert "sub" in found


def test_statistics_of_each_row_mix_nothing():
    b = Builder()
    x = b.input((4, 8))
    total = b.call(aten.sum.dim_IntList, V(x), [1], True)
    assert names(b, b.call(aten.sub.Tensor, V(x), V(total))) == []


def test_what_all_rows_read_but_none_made_mixes_nothing():
    b = Builder()
    x, scale = b.input((4, 8)), b.input((1, 8), "buffer")
    assert names(b, b.call(aten.mul.Tensor, V(x), V(scale))) == []


def test_backward_is_not_asked():
    b = Builder()
    x = b.input((4, 8))
    b.backward = True
    total = b.call(aten.sum.dim_IntList, V(x), [0], True)
    assert names(b, b.call(aten.sub.Tensor, V(x), V(total))) == []
