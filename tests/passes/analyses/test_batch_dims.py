"""Which factors are rows of the batch: inputs that are data before -> marks on every value after."""
from __future__ import annotations

from tests.passes.graphs import Builder, V, aten


def test_rows_are_followed_through_products_views_and_sums_but_not_into_weights():
    b = Builder()
    x, w = b.input((4, 6, 8)), b.input((8, 16), "parameter")
    flat = b.call(aten.view.default, V(x), [24, 8])
    y = b.call(aten.mm.default, V(flat), V(w))
    heads = b.call(aten.view.default, V(y), [4, 6, 2, 8])
    turned = b.call(aten.permute.default, V(heads), [0, 2, 1, 3])
    columns = b.call(aten.sum.dim_IntList, V(turned), [0])
    graph = b.finish([columns])
    batch = {v: graph.values[v].batch for v in (x, w, flat, y, heads, turned, columns)}
    assert batch == {
        x: {(0, 0)}, w: frozenset(), flat: {(0, 0)},  # factor 0 of 24 = 4 * 6
        y: {(0, 0)}, heads: {(0, 0)}, turned: {(0, 0)}, columns: frozenset(),
    }


def test_the_gradient_of_a_weight_has_no_rows():
    b = Builder()
    x, w = b.input((4, 8)), b.input((8, 16), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    b.backward = True
    t = b.call(aten.permute.default, V(x), [1, 0])
    g = b.call(aten.mm.default, V(t), V(y))
    graph = b.finish([(g, w)])
    assert graph.values[t].batch == {(1, 0)}
    assert graph.values[g].batch == frozenset()


def test_only_dim_0_of_inputs_that_are_data_counts():
    b = Builder()
    x, scale, one = b.input((4, 8)), b.input((8,), "buffer"), b.input((1, 8))
    y = b.call(aten.mul.Tensor, V(x), V(scale))
    z = b.call(aten.mul.Tensor, V(one), V(scale))
    graph = b.finish([y, z])
    assert graph.values[y].batch == {(0, 0)}
    assert not graph.values[scale].batch and not graph.values[one].batch and not graph.values[z].batch


def test_labels_of_the_same_rows_join_their_data():
    b = Builder()
    x, labels = b.input((4, 8)), b.input((4, 1))
    y = b.call(aten.mul.Tensor, V(x), V(labels))
    graph = b.finish([y])
    assert graph.values[y].batch == graph.values[labels].batch == {(0, 0)}
