"""Factors of dims: views before -> factors of every value that they reach after."""
from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.analyses.dim_factors import RuledCall, factorize, places_of
from tests.passes.graphs import Builder, V, aten
from tests.passes.sharding.random_graphs import graphs


def factors(builder: Builder, value: int):
    return builder.finish([]).values[value].factors


def test_without_views_a_dim_is_one_factor_and_a_dim_of_one_has_none():
    b = Builder()
    x, w = b.input((8, 1)), b.input((1, 12), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    assert [factors(b, v) for v in (x, w, y)] == [((8,), ()), ((), (12,)), ((8,), (12,))]


def test_a_view_reaches_the_parameter_before_it():
    b = Builder()
    x, w = b.input((8, 16)), b.input((16, 12), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    heads = b.call(aten.view.default, V(y), [8, 3, 4])
    assert factors(b, w) == ((16,), (3, 4))
    assert factors(b, y) == ((8,), (3, 4))
    assert factors(b, heads) == ((8,), (3,), (4,))


def test_a_view_reaches_what_comes_after_it_and_both_ends_of_a_transpose():
    b = Builder()
    x = b.input((2, 5, 6))
    flat = b.call(aten.view.default, V(x), [10, 6])
    turned = b.call(aten.permute.default, V(flat), [1, 0])
    assert factors(b, flat) == ((2, 5), (6,))
    assert factors(b, turned) == ((6,), (2, 5))


def test_cuts_of_several_views_refine_each_other():
    b = Builder()
    x = b.input((24,))
    b.call(aten.view.default, V(x), [2, 12])
    b.call(aten.view.default, V(x), [8, 3])
    assert factors(b, x) == ((2, 4, 3),)


@pytest.mark.parametrize(("first", "second"), [([3, 4], [4, 3]), ([4, 3], [3, 4])])
def test_a_cut_that_does_not_fit_the_others_is_left_out(first, second):
    b = Builder()
    x = b.input((12,))
    kept = b.call(aten.view.default, V(x), first)
    odd = b.call(aten.view.default, V(x), second)
    graph = b.finish([kept, odd])
    assert graph.values[x].factors == (tuple(first),)
    # the view that fits maps factor to factor; of the other one only the outermost factor may be split, if at all
    splits = [s for s in graph.operations[1].strategies if s.splits]
    assert all(s.inputs == ((0, 0),) and s.outputs == ((0, 0),) for s in splits)
    assert {s.inputs[0] for s in graph.operations[0].strategies} == {"R", (0, 0), (0, 1)}


def test_a_sum_of_two_views_has_the_cuts_of_both():
    b = Builder()
    x, y = b.input((24,)), b.input((24,))
    both = b.call(aten.add.Tensor, V(x), V(y))
    b.call(aten.view.default, V(x), [2, 12])
    b.call(aten.view.default, V(y), [6, 4])
    assert factors(b, x) == factors(b, y) == factors(b, both) == ((2, 3, 4),)


@st.composite
def views(draw):
    """A chain of pointwise calls, transposes and views that take dims apart or put them together."""
    b = Builder()
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 12)), min_size=1, max_size=3))
    live = [b.input(shape)]
    for _ in range(draw(st.integers(1, 6))):
        x = draw(st.sampled_from(live))
        shape = list(b.values[x].spec.shape)
        kind = draw(st.sampled_from(("split", "merge", "permute", "exp")))
        d = draw(st.integers(0, len(shape) - 1))
        if kind == "split":
            inner = draw(st.sampled_from([k for k in range(1, shape[d] + 1) if shape[d] % k == 0]))
            live.append(b.call(aten.view.default, V(x), [*shape[:d], shape[d] // inner, inner, *shape[d + 1:]]))
        elif kind == "merge" and d + 1 < len(shape):
            live.append(b.call(aten.reshape.default, V(x), [*shape[:d], shape[d] * shape[d + 1], *shape[d + 2:]]))
        elif kind == "permute":
            live.append(b.call(aten.permute.default, V(x), draw(st.permutations(range(len(shape))))))
        else:
            live.append(b.call(aten.exp.default, V(x)))
    return b


@settings(max_examples=150, deadline=None)
@given(st.one_of(views(), st.none()), graphs())
def test_factors_multiply_to_the_size_and_letters_agree_where_their_bounds_do(builder, random_graph):
    graph = random_graph if builder is None else builder.finish([])
    for value in graph.values:
        assert [math.prod(row) for row in value.factors] == list(value.spec.shape)
        assert all(f > 1 for row in value.factors for f in row)
    for op in graph.operations:
        for s in op.strategies:
            placed = [(graph.values[v], p) for v, p in zip((*op.inputs, *op.outputs), s.inputs + s.outputs)
                      if isinstance(p, tuple)]
            # what one strategy splits together has one size, or starts its dim or letter (a contiguous part of it)
            assert len({v.factors[d][k] for v, (d, k) in placed}) <= 1 or all(k == 0 for _, (_, k) in placed)


def test_factorize_does_not_depend_on_the_order_of_calls():
    b = Builder()
    x, w = b.input((4, 6, 8)), b.input((8, 24), "parameter")
    flat = b.call(aten.view.default, V(x), [24, 8])
    y = b.call(aten.mm.default, V(flat), V(w))
    b.call(aten.view.default, V(y), [4, 6, 2, 12])
    values = b.finish([]).values
    calls = [RuledCall(r, op.inputs, op.outputs) for r, op in zip(b.rules, b.operations)]
    shapes = [v.spec.shape for v in values]
    assert factorize(shapes, calls) == factorize(shapes, calls[::-1]) == [v.factors for v in values]
    assert values[w].factors == ((8,), (2, 12))
    strides = {(place, stride) for letter, place, stride in places_of(calls[0])}
    assert ((flat, 0), 6) in strides and ((flat, 0), 1) in strides  # 24 rows are 4 of 6
