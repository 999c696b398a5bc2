"""Steps from layout to layout before -> legal ones, their collectives and costs after."""
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.cost_terms import SLICE, copy
from passes.graph.layouts import format_layout, legal, local_bytes, parse_layout
from passes.graph.placement_graph import Value
from passes.op_rules.base import Spec
from passes.sharding.pricing.decision_terms import LocalSizes, collective
from passes.sharding.pricing.redistribution import bucket_bytes_of, cheapest_route, hops_between, layouts_between, priced_hop
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten


def value(*factors: tuple[int, ...], itemsize: int = 4) -> Value:
    shape = []
    for row in factors:
        size = 1
        for f in row:
            size *= f
        shape.append(size)
    return Value(0, "v", Spec(tuple(shape), "float32", itemsize), factors, None)


COLUMNS = value((8,), (16,))
PRICES = Prices()


@pytest.mark.parametrize(("source", "target", "kind"), [
    ("P", "R", "all_reduce"), ("P", (0, 0), "reduce_scatter"), ("M", "R", "all_reduce"), ("M", (0, 0), None),
    ("R", (1, 0), "slice"), ((0, 0), "R", "all_gather"), ((0, 0), (1, 0), "all_to_all"), ((0, 0), "P", None),
    ("R", "P", None), ("R", "M", None), ("P", "M", None), ("M", "P", None),
])
def test_collectives(source, target, kind):
    assert collective(source, target) == kind


@pytest.mark.parametrize(("layout", "axis", "target", "ok"), [
    (("R", "R"), 0, (0, 0), True),
    (("R", (0, 0)), 0, (0, 0), False),  # the outer axis cannot split what an inner one splits already
    (((0, 0), "R"), 1, (0, 0), True),
    (((0, 0), (0, 0)), 0, "R", False),  # nor stop splitting it
    (((0, 0), (0, 0)), 1, "R", True),
    (((0, 0), (1, 0)), 0, "R", True),
    (("P", (0, 0)), 0, (1, 0), True),
    (("R", "R"), 0, "R", False),
])
def test_axes_that_split_one_factor_are_nested(layout, axis, target, ok):
    step = priced_hop(COLUMNS, layout, axis, target, axes_of(2, 2), PRICES)
    assert (step is not None) == ok
    if step:
        assert step.axis == axis and step.target[axis] == target and step.source == layout


def test_sizes_that_do_not_divide_are_not_legal():
    v = value((6,), (4,))
    assert legal(v, ((0, 0),), axes_of(2)) and not legal(v, ((0, 0),), axes_of(4))
    assert legal(v, ((1, 0), (1, 0)), axes_of(2, 2)) and not legal(v, ((0, 0), (0, 0)), axes_of(2, 2))
    assert priced_hop(v, ("R",), 0, (0, 0), axes_of(4), PRICES) is None
    assert priced_hop(v, ((0, 0), "R"), 1, (0, 0), axes_of(2, 2), PRICES) is None


def test_what_a_rank_holds():
    assert COLUMNS.bytes == 512
    assert [local_bytes(COLUMNS, p, axes_of(2, 4)) for p in (("R", "P"), ((0, 0), "R"), ((0, 0), (0, 0)), ("P", (1, 0)))] \
        == [512, 256, 64, 128]


@pytest.mark.parametrize("layout", [("R", "P"), ((0, 0), (1, 2)), ("M",), ()])
def test_layouts_as_text(layout):
    assert parse_layout(format_layout(layout)) == layout


@pytest.mark.parametrize(("layout", "axis", "target", "cost"), [
    # Prices(): 2 + 0.01 per byte on axis 0, twice that for all_reduce; a copy is 0.5 + 0.001 per byte
    (("R",), 0, (0, 0), SLICE),
    (("P",), 0, "R", 2 * (2 + 5.12)),
    (("P",), 0, (0, 0), 2 + 5.12),
    (("P",), 0, (1, 0), 2 + 5.12 + 0.5 + 0.512),  # packed before
    (((0, 0),), 0, "R", 2 + 5.12),  # the gathered bytes
    (((1, 0),), 0, "R", 2 + 5.12 + 0.5 + 0.512),  # unpacked after
    (((0, 0),), 0, (1, 0), 2 + 2.56 + 0.5 + 0.256),
    (((1, 0),), 0, (0, 0), 2 + 2.56 + 0.5 + 0.256),
])
def test_costs(layout, axis, target, cost):
    step = priced_hop(COLUMNS, layout, axis, target, axes_of(2), PRICES)
    assert step is not None and step.cost == pytest.approx(cost, rel=1e-12)


@pytest.mark.parametrize(("target", "bucket", "cost"), [
    ("R", 2048, (2 * (2 + 20.48) + 2 * (0.5 + 2.048)) / 4),  # a quarter of a bucket of 2 KiB, copied into it
    ((1, 0), 1024, (2 + 10.24 + 2 * (0.5 + 1.024)) / 2),
    ("R", 512, 2 * (2 + 5.12)),  # fills it: goes by itself
])
def test_a_gradient_pays_its_part_of_a_bucket(target, bucket, cost):
    step = priced_hop(COLUMNS, ("P",), 0, target, axes_of(2), PRICES, bucket)
    assert step is not None and step.term.bytes == 512 and step.cost == pytest.approx(cost, rel=1e-12)


def test_only_reductions_share_a_bucket():
    gather = priced_hop(COLUMNS, ((0, 0),), 0, "R", axes_of(2), PRICES)
    assert gather is not None and priced_hop(COLUMNS, ((0, 0),), 0, "R", axes_of(2), PRICES, 2048) == gather


def test_all_gradients_of_a_small_model_pay_one_latency():
    b = Builder()
    x, w, v = b.input((8, 4)), b.input((4, 6), "parameter"), b.input((6, 2), "parameter")
    graph = b.finish([(b.call(aten.mm.default, V(x), V(w)), w), (b.call(aten.mm.default, V(x), V(w)), v)])
    bucket = bucket_bytes_of(graph)
    assert bucket == 4 * (24 + 12)
    gradients = [priced_hop(value((r,), (c,)), ("P",), 0, "R", axes_of(2), PRICES, bucket) for r, c in ((4, 6), (6, 2))]
    together = sum(step.cost for step in gradients if step is not None)
    assert together == pytest.approx(PRICES.collective("all_reduce", 0, bucket) + 2 * copy(bucket, PRICES))


@pytest.mark.parametrize(("v", "place", "is_outermost"), [
    (COLUMNS, (0, 0), True), (COLUMNS, (1, 0), False), (value((), (16,)), (1, 0), True),
    (value((2, 4), (3,)), (0, 0), True), (value((2, 4), (3,)), (0, 1), False),
])
def test_parts_lie_one_after_another_only_along_the_outermost_factor(v, place, is_outermost):
    assert (LocalSizes(axes_of(2)).outer(v, place) == 1) == is_outermost


PLACES = ("R", "P", (0, 0), (1, 0), (1, 1))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([axes_of(2), axes_of(2, 2), axes_of(2, 4)]), st.data(), st.floats(0, 50), st.floats(1e-4, 1))
def test_the_cheapest_route_is_the_cheapest_of_all(axes, data, latency, per_byte):
    v = value((8,), (4, 4))
    prices = Prices(latency=(latency, 3.0), us_per_byte=(per_byte, 0.05))
    layouts = [p for p in itertools.product(PLACES, repeat=len(axes)) if legal(v, p, axes)]
    source, target = data.draw(st.sampled_from(layouts)), data.draw(st.sampled_from(layouts))
    extra = data.draw(st.lists(st.sampled_from(layouts), max_size=3))
    between = layouts_between(v, [source, target, *extra], axes)
    best = {p: 0.0 if p == source else float("inf") for p in between}
    for _ in between:  # Bellman and Ford
        for p in between:
            for axis in range(len(axes)):
                for q in {x[axis] for x in between}:
                    step = priced_hop(v, p, axis, q, axes, prices)
                    if step is not None and step.target in best:
                        best[step.target] = min(best[step.target], best[p] + step.cost)
    route = cheapest_route(v, source, target, axes, prices, extra)
    if route is None:
        assert best[target] == float("inf")
        return
    cost, steps = route
    assert cost == pytest.approx(best[target], rel=1e-12) == pytest.approx(sum(s.cost for s in steps), rel=1e-12)
    at = source
    for step in steps:
        assert step.source == at
        at = step.target
    assert at == target


def test_a_way_exists_between_any_two_layouts_that_are_no_partial_sums():
    v, axes = value((8,), (16,)), axes_of(2, 2)
    ends = [p for p in itertools.product(("R", (0, 0), (1, 0)), repeat=2) if legal(v, p, axes)]
    assert len(ends) == 9
    for source, target in itertools.product(ends, repeat=2):
        assert cheapest_route(v, source, target, axes, PRICES) is not None, (source, target)
    for target in ends:
        assert cheapest_route(v, ("P", "P"), target, axes, PRICES) is not None, target
        assert cheapest_route(v, target, ("P", "R"), axes, PRICES) is None or target == ("P", "R")


def test_ways_stay_between_their_ends():
    ends = [(("R"), (0, 0)), ((0, 0), "R")]
    layouts = set(layouts_between(COLUMNS, ends, axes_of(2, 2)))
    assert layouts == {("R", "R"), ("R", (0, 0)), ((0, 0), "R"), ((0, 0), (0, 0))}
    steps = hops_between(COLUMNS, ends, axes_of(2, 2), PRICES)
    assert all(s.source in layouts and s.target in layouts for s in steps)
    assert {(s.source, s.target) for s in steps} == {
        (("R", "R"), ("R", (0, 0))), (("R", "R"), ((0, 0), "R")), (("R", (0, 0)), ("R", "R")),
        (((0, 0), "R"), ("R", "R")), (((0, 0), "R"), ((0, 0), (0, 0))), (((0, 0), (0, 0)), ((0, 0), "R")),
    }
