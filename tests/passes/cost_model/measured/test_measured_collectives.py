"""Measured groups use their curve, others scale from the nearest, and the formula serves the rest."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.cost_model import COLLECTIVE_KINDS, collective_us
from passes.cost_model.measured.measured_collectives import (
    KIND,
    CollectivePoint,
    MeasuredCollectives,
    MeasuredGroup,
    fit_points,
    read_points,
)
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import price_axis

SIZES = [4**k for k in range(5, 13)]
NODES = Cluster.parse("4x8:h100-80g")
PAIR = MeasuredGroup(2, 1, 32, 8, "nccl")
NODE = MeasuredGroup(8, 1, 32, 8, "nccl")
ACROSS = MeasuredGroup(4, 8, 32, 8, "nccl")
ALL = MeasuredGroup(32, 1, 32, 8, "nccl")


def axis_of(group: MeasuredGroup):
    return price_axis("measured", group.size, group.stride, NODES)


def times_the_formula(factor: float, *groups: MeasuredGroup, kind: str = "all_reduce") -> list[CollectivePoint]:
    return [
        CollectivePoint(kind, group, size, factor * collective_us(kind, axis_of(group), size))
        for group in groups for size in SIZES
    ]


def test_a_measured_group_has_the_measured_times():
    curve = {size: 50 + 0.002 * size for size in SIZES}
    prices = MeasuredCollectives([CollectivePoint("all_reduce", NODE, s, us) for s, us in curve.items()], axis_of)
    axis = price_axis("tp", 8, 1, NODES)
    for size, us in curve.items():
        assert prices.collective_us("all_reduce", axis, size) == pytest.approx(us)
    assert prices.collective_us("all_reduce", axis, 3000) == pytest.approx(50 + 0.002 * 3000)
    assert prices.collective_us("all_reduce", axis, 0) == pytest.approx(50)


def test_another_size_of_group_is_scaled_from_the_nearest():
    prices = MeasuredCollectives(times_the_formula(2, PAIR) + times_the_formula(3, NODE), axis_of)
    for group, factor in [((2, 1), 2), ((2, 4), 2), ((8, 1), 3)]:
        axis = price_axis("x", *group, NODES)
        assert prices.collective_us("all_reduce", axis, 10**6) == pytest.approx(
            factor * collective_us("all_reduce", axis, 10**6), rel=0.02)
    nodes = Cluster.parse("4x16:h100-80g")
    sixteen = price_axis("x", 16, 1, nodes)
    assert prices.collective_us("all_reduce", sixteen, 10**6) == pytest.approx(
        3 * collective_us("all_reduce", sixteen, 10**6), rel=0.02)


def test_levels_count_more_than_sizes():
    prices = MeasuredCollectives(
        times_the_formula(2, NODE) + times_the_formula(5, ACROSS) + times_the_formula(7, ALL), axis_of)
    inside, across, both = price_axis("x", 4, 1, NODES), price_axis("x", 2, 8, NODES), price_axis("x", 16, 1, NODES)
    for axis, factor in [(inside, 2), (across, 5), (both, 7)]:
        assert prices.collective_us("all_reduce", axis, 10**6) == pytest.approx(
            factor * collective_us("all_reduce", axis, 10**6), rel=0.05)


def test_of_equal_groups_the_one_in_the_same_world_is_nearest():
    alone, crowd = MeasuredGroup(2, 1, 2, 2, "gloo"), MeasuredGroup(2, 1, 8, 8, "gloo")
    pair = price_axis("x", 2, 1, NODES)
    points = [CollectivePoint("broadcast", g, s, us) for g, us in [(alone, 10.0), (crowd, 90.0)] for s in SIZES]
    for world, us in [(2, 10), (8, 90), (16, 90)]:
        prices = MeasuredCollectives(points, lambda group: pair, world_size=world)
        assert prices.collective_us("broadcast", pair, 5000) == pytest.approx(us)


def test_beyond_the_largest_size_the_formula_grows_from_what_was_measured():
    prices = MeasuredCollectives(times_the_formula(2, NODE), axis_of)
    axis = axis_of(NODE)
    at_largest = prices.collective_us("all_reduce", axis, SIZES[-1]) / collective_us("all_reduce", axis, SIZES[-1])
    assert prices.collective_us("all_reduce", axis, 10**10) == pytest.approx(
        at_largest * collective_us("all_reduce", axis, 10**10))


def test_one_size_tells_one_ratio():
    point = CollectivePoint("all_gather", NODE, 4096, 4 * collective_us("all_gather", axis_of(NODE), 4096))
    prices = MeasuredCollectives([point], axis_of)
    for size in (0, 100, 4096, 10**9):
        assert prices.collective_us("all_gather", axis_of(NODE), size) == pytest.approx(
            4 * collective_us("all_gather", axis_of(NODE), size))


def test_a_kind_that_was_not_measured_has_the_formula():
    prices = MeasuredCollectives(times_the_formula(2, NODE), axis_of)
    axis = axis_of(NODE)
    assert prices.is_measured("all_reduce") and not prices.is_measured("broadcast")
    assert prices.collective_us("broadcast", axis, 12345) == collective_us("broadcast", axis, 12345)
    plus_launch = MeasuredCollectives([], axis_of, formula=lambda *a: collective_us(*a) + 5)
    assert plus_launch.collective_us("broadcast", axis, 12345) == collective_us("broadcast", axis, 12345) + 5


def test_an_axis_of_one_rank_is_free_and_an_unknown_kind_refused():
    prices = MeasuredCollectives(times_the_formula(2, NODE), axis_of)
    assert prices.collective_us("all_reduce", price_axis("x", 1, 1, NODES), 10**6) == 0
    with pytest.raises(ValueError, match="unknown collective"):
        prices.collective_us("gather", axis_of(NODE), 10)


@given(st.sampled_from(COLLECTIVE_KINDS), st.lists(st.floats(1, 1e5), min_size=len(SIZES), max_size=len(SIZES)),
       st.sampled_from([(2, 1), (4, 1), (4, 8), (16, 1), (32, 1)]), st.lists(st.floats(0, 1e10), min_size=2, max_size=9))
def test_prices_are_positive_and_never_fall(kind, times, group, sizes):
    points = [CollectivePoint(kind, NODE, size, us) for size, us in zip(SIZES, times)]
    prices = MeasuredCollectives(points, axis_of)
    axis = price_axis("x", *group, NODES)
    found = [prices.collective_us(kind, axis, size) for size in sorted(sizes)]
    assert found[0] >= 0
    assert all(low <= high * (1 + 1e-9) for low, high in zip(found, found[1:]))


def test_points_come_back_from_the_cache(tmp_path):
    points = times_the_formula(2, NODE, ACROSS)
    with MeasurementCache(tmp_path / "cache.sqlite") as cache:
        cache.put_all("gpu", KIND, {p.key: TimedMeasurement(p.us, 5, 1.1, {**p.extra, "more": 1}) for p in points})
        assert sorted(read_points(cache, "gpu"), key=str) == sorted(points, key=str)
        assert read_points(cache, "another gpu") == []
        cache.put("gpu", KIND, "strange", TimedMeasurement(1.0, 1))
        with pytest.raises(BadInput) as error:
            read_points(cache, "gpu")
    assert str(cache.path) in error.value.where


def test_one_curve_for_each_kind_and_group_measured_at_two_sizes():
    points = [*times_the_formula(1, NODE, ACROSS), CollectivePoint("broadcast", NODE, 1024, 1.0)]
    assert set(fit_points(points)) == {("all_reduce", NODE), ("all_reduce", ACROSS)}


def test_the_axis_of_a_group_on_this_machine():
    group = MeasuredGroup(2, 2, 4, 2, "gloo")
    cluster = Cluster.local(4, "cpu", devices_per_node=2)
    assert group.axis("cpu") == price_axis("measured", 2, 2, cluster)
