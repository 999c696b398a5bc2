"""Operations before -> groups that need one decision each after."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.graph.step_phase import BACKWARD
from passes.sharding.grouping.op_groups import groups_of
from tests.passes.graphs import Builder, V, aten
from tests.passes.sharding.random_graphs import graphs


def groups(builder: Builder, outputs) -> list[tuple[int, ...]]:
    return [c.operations for c in groups_of(builder.finish(outputs))]


def chain() -> tuple[Builder, int]:
    b = Builder()
    return b, b.input((64, 8))


def test_views_join_the_product_that_they_lead_to():
    b, x = chain()
    w = b.input((16, 8), "parameter")
    t = b.call(aten.permute.default, V(w), [1, 0])
    y = b.call(aten.mm.default, V(x), V(t))
    assert groups(b, [y]) == [(0, 1)]


def test_a_view_of_two_products_stays_between_them():
    b, x = chain()
    t = b.call(aten.permute.default, V(x), [1, 0])
    y = b.call(aten.mm.default, V(x), V(t))
    z = b.call(aten.mm.default, V(t), V(x))
    assert groups(b, [y, z]) == [(0,), (1,), (2,)]


def test_linear_operations_join_the_product_that_they_follow_and_others_do_not():
    b, x = chain()
    w = b.input((8, 8), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    y = b.call(aten.neg.default, V(y))
    y = b.call(aten.view.default, V(y), [64, 2, 4])
    z = b.call(aten.exp.default, V(y))
    z = b.call(aten.tanh.default, V(z))
    assert groups(b, [z]) == [(0, 1, 2), (3, 4)]


@pytest.mark.parametrize(("follows", "joins"), [("bias", False), ("scale", True)])
def test_what_partial_sums_do_not_get_through_does_not_join_a_product_that_can_make_them(follows, joins):
    b = Builder()
    x, w, small = b.input((64, 32)), b.input((32, 16), "parameter"), b.input((16,), "parameter")
    product = b.call(aten.mm.default, V(x), V(w))
    last = b.call(aten.add.Tensor if follows == "bias" else aten.mul.Tensor, V(product), V(small))
    graph = b.finish([last])
    groups = groups_of(graph)
    assert (len(groups) == 1) == joins


def test_a_linear_operation_that_makes_more_than_the_product_stays_apart():
    b, x = chain()
    w = b.input((8, 8), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    z = b.call(aten.expand.default, V(b.call(aten.unsqueeze.default, V(y), 0)), [16, 64, 8])
    assert groups(b, [z]) == [(0, 1), (2,)]


def test_pointwise_operations_join_each_other_and_small_operands_do_not_count():
    b, x = chain()
    scale = b.input((8,), "parameter")
    y = b.call(aten.exp.default, V(x))
    total = b.call(aten.sum.dim_IntList, V(y), [1], True)
    y = b.call(aten.div.Tensor, V(y), V(total))
    y = b.call(aten.mul.Tensor, V(y), V(scale))
    assert groups(b, [y]) == [(0, 1, 2, 3)]


def test_a_sum_of_products_stays_apart_so_that_partial_sums_are_added_before_they_are_reduced():
    b, x = chain()
    products = [b.call(aten.mm.default, V(x), V(b.input((8, 8), "parameter"))) for _ in range(3)]
    two = b.call(aten.add.Tensor, V(products[0]), V(products[1]))
    three = b.call(aten.add.Tensor, V(two), V(products[2]))
    out = b.call(aten.exp.default, V(three))
    assert groups(b, [out]) == [(0,), (1,), (2,), (3, 4), (5,)]


def test_a_residual_sum_with_several_readers_starts_a_group():
    b, x = chain()
    h = b.call(aten.exp.default, V(x))
    total = b.call(aten.add.Tensor, V(h), V(b.input((64, 8))))
    norm = b.call(aten.tanh.default, V(total))
    last = b.call(aten.mul.Tensor, V(norm), V(total))
    assert groups(b, [last]) == [(0,), (1, 2, 3)]


@pytest.mark.parametrize("border", ["block", "backward", "ruled"])
def test_groups_end_at_blocks_phases_and_operators_without_a_rule(border):
    b, x = chain()
    y = b.call(aten.exp.default, V(x), ruled=border != "ruled")
    if border != "ruled":
        setattr(b, border, "layers.1" if border == "block" else True)
    z = b.call(aten.tanh.default, V(y))
    assert groups(b, [z]) == [(0,), (1,)]


def test_a_forward_view_that_only_a_backward_product_reads_is_done_there():
    b, x = chain()
    t = b.call(aten.permute.default, V(x), [1, 0])
    b.backward = True
    y = b.call(aten.mm.default, V(t), V(b.input((64, 4), "tangent")))
    (c,) = groups_of(b.finish([y]))
    assert c.operations == (0, 1) and c.phase == BACKWARD


def test_a_view_whose_result_is_returned_is_no_part_of_the_product():
    b, x = chain()
    t = b.call(aten.permute.default, V(x), [1, 0])
    y = b.call(aten.mm.default, V(t), V(b.input((64, 4))))
    assert groups(b, [y, t]) == [(0,), (1,)]
    assert groups(b, [y]) == [(0, 1)]


@settings(max_examples=200, deadline=None)
@given(graphs(most=7), st.booleans())
def test_every_operation_is_in_one_group_and_ports_are_what_crosses_its_border(graph, merge):
    groups = groups_of(graph, merge)
    assert sorted(i for c in groups for i in c.operations) == list(range(len(graph.operations)))
    assert [c.index for c in groups] == list(range(len(groups)))
    owner = {i: c.index for c in groups for i in c.operations}
    returned = {v for v, _ in graph.outputs}
    for c in groups:
        assert list(c.operations) == sorted(c.operations)
        own = [graph.operations[i] for i in c.operations]
        assert {(op.phase, op.block) for op in own if op.kind != "view"} <= {(c.phase, c.block)}
        assert sum(op.heavy for op in own) <= 1 and (merge or len(own) == 1)
        made = {v for op in own for v in op.outputs}
        assert set(c.inputs) == {v for op in own for v in op.inputs} - made
        assert set(c.outputs) == {
            v for v in made if v in returned or any(owner[u] != c.index for u in graph.values[v].users)}
