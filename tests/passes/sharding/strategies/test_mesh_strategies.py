"""Groups -> their strategies on a whole mesh, with costs."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.graph.decision import OperationLayouts
from passes.sharding.grouping.op_groups import groups_of
from passes.sharding.pricing.decision_terms import operation_share
from passes.sharding.strategies.mesh_strategies import slices, strategies_on_mesh
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.exhaustive import Game
from tests.passes.sharding.random_graphs import graphs

FREE = (lambda op, strategy: True,) * 2


def stands_in(one: tuple, other: tuple, reads: bool) -> bool:
    """Whether a layout does for another: cutting a part out is free."""
    if reads:
        return all(p == q or (isinstance(p, tuple) and q == "R") for p, q in zip(one, other))
    return all(p == q or (p == "R" and isinstance(q, tuple)) for p, q in zip(one, other))


@settings(max_examples=120, deadline=None)
@given(graphs(most=7), st.sampled_from([(2,), (3,), (2, 2)]), st.sampled_from([0.0, 2.0]))
def test_choices_are_the_cheapest_for_each_boundary_and_none_is_missing(graph, sizes, latency):
    prices = Prices(latency=(latency, latency))
    groups = groups_of(graph)
    game = Game(graph, sizes, prices, groups)
    for c in groups:
        if len(c.operations) > (3 if len(sizes) > 1 else 7):
            continue  # too many to try them all
        ways = game.group_ways(c)
        choices = strategies_on_mesh(c, graph, axes_of(*sizes), prices, FREE[: len(sizes)])
        assert len({(x.inputs, x.outputs) for x in choices}) == len(choices)
        for x in choices:
            assert x.cost == pytest.approx(ways[x.inputs, x.outputs], rel=1e-12)
        for (inputs, outputs), cost in ways.items():
            assert any(
                x.cost <= cost * (1 + 1e-12)
                and all(stands_in(p, q, True) for p, q in zip(x.inputs, inputs))
                and all(stands_in(p, q, False) for p, q in zip(x.outputs, outputs)) for x in choices
            ), (inputs, outputs)


def product() -> tuple[Builder, int]:
    b = Builder()
    x, w = b.input((8, 16)), b.input((16, 4), "parameter")
    return b, b.call(aten.mm.default, V(x), V(w))


def test_a_product_costs_what_its_parts_take():
    b, y = product()
    graph = b.finish([y])
    prices = Prices(us_per_flop=1.0, launch=0.5)
    (c,) = groups_of(graph)
    found = {(x.inputs, x.outputs): x.cost for x in strategies_on_mesh(c, graph, axes_of(2, 2), prices, FREE)}
    assert found[(("R", "R"), ("R", "R")), (("R", "R"),)] == 2 * 8 * 16 * 4 + 0.5
    assert found[(((0, 0), "R"), ("R", (1, 0))), (((0, 0), (1, 0)),)] == 2 * 8 * 16 * 4 / 4 + 0.5
    assert found[(((1, 0), (1, 0)), ((0, 0), (0, 0))), (("P", "P"),)] == 2 * 8 * 16 * 4 / 4 + 0.5
    by_memory = Prices(us_per_flop=0.0, launch=0.0, memory=1.0)
    found = {(x.inputs, x.outputs): x.cost for x in strategies_on_mesh(c, graph, axes_of(2, 2), by_memory, FREE)}
    assert found[(((0, 0), "R"), ("R", "R")), (((0, 0), "R"),)] == 4 * (8 * 16 / 2 + 16 * 4 + 8 * 4 / 2)


def test_two_axes_split_one_factor_only_if_it_divides_by_both():
    b = Builder()
    y = b.call(aten.exp.default, V(b.input((2, 6))))
    graph = b.finish([y])
    (c,) = groups_of(graph)
    found = {x.inputs[0] for x in strategies_on_mesh(c, graph, axes_of(2, 2), Prices(), FREE)}
    assert ((0, 0), (0, 0)) not in found and ((1, 0), (1, 0)) not in found
    assert {((0, 0), (1, 0)), ((1, 0), (0, 0))} <= found
    found = {x.inputs[0] for x in strategies_on_mesh(c, graph, axes_of(2, 3), Prices(), FREE)}
    assert ((1, 0), (1, 0)) in found


def test_readers_of_a_value_from_outside_may_split_one_factor_over_different_axes():
    b = Builder()
    x = b.input((2, 2))
    graph = b.finish([b.call(aten.add.Tensor, V(b.call(aten.permute.default, V(x), [1, 0])), V(x))])
    (c,) = groups_of(graph)
    found = {(s.inputs, s.outputs) for s in strategies_on_mesh(c, graph, axes_of(2, 2), Prices(), FREE)}
    assert ((("R", "R"),), (((1, 0), (0, 0)),)) in found


def test_light_groups_are_one_kernel_over_their_boundary_and_views_cost_nothing():
    b = Builder()
    x = b.input((8, 4))
    y = b.call(aten.exp.default, V(x))
    y = b.call(aten.tanh.default, V(y))
    graph = b.finish([y])
    (c,) = groups_of(graph)
    prices = Prices(memory=1.0, launch=0.5)
    found = {x.inputs[0]: x.cost for x in strategies_on_mesh(c, graph, axes_of(2), prices, FREE[:1])}
    assert found[(0, 0),] == 2 * 8 * 4 * 4 / 2 + 0.5
    b = Builder()
    y = b.call(aten.permute.default, V(b.input((8, 4))), [1, 0])
    graph = b.finish([y])
    (c,) = groups_of(graph)
    assert {x.cost for x in strategies_on_mesh(c, graph, axes_of(2), prices, FREE[:1])} == {0.0}


def test_each_axis_obeys_its_own_rule():
    b, y = product()
    graph = b.finish([y])
    (c,) = groups_of(graph)
    rows = lambda op, s: s.inputs[0] == (0, 0)  # noqa: E731
    columns = lambda op, s: s.inputs[1] == (1, 0)  # noqa: E731
    (only,) = strategies_on_mesh(c, graph, axes_of(2, 2), Prices(), (rows, columns))
    assert only.outputs == (((0, 0), (1, 0)),)


def test_the_share_of_work_is_that_of_the_axes_that_split_anything():
    row = OperationLayouts((((0, 0), "R"), ("R", "R")), (((0, 0), "P"),), (((0, 0), "R"),))
    assert operation_share(row, axes_of(2, 4)) == 1 / 2
    row = OperationLayouts((("R", (1, 0)),), (("R", "P"),), (("R", "P"),))
    assert operation_share(row, axes_of(2, 4)) == 1 / 4


@pytest.mark.parametrize(("source", "target", "way"), [
    (("R", "R"), ("R", "R"), []),
    (("R", "R"), ((0, 0), (0, 0)), [((0, 0), "R"), ((0, 0), (0, 0))]),
    (("R", (0, 0)), ((0, 0), (0, 0)), None),
    (("R", (0, 0)), ((1, 0), (0, 0)), [((1, 0), (0, 0))]),
    (((0, 0), "R"), ("R", "R"), None),
    (("P", "R"), ((0, 0), "R"), None),
])
def test_parts_are_cut_out_from_the_outer_axis_in(source, target, way):
    b = Builder()
    graph = b.finish([b.call(aten.exp.default, V(b.input((8, 4))))])
    assert slices(graph.values[0], source, target, axes_of(2, 2)) == way
