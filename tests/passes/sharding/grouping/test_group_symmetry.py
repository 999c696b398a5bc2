"""Repeated blocks -> classes that choose alike, and an ILP whose size does not grow."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.grouping.group_symmetry import classes_of
from passes.sharding.grouping.op_groups import groups_of
from passes.sharding.search.mesh_placement import solve_on_mesh
from passes.solver import ilp
from passes.solver.ilp_search import solve
from passes.solver.reduction import reduce
from passes.solver.solvers import SolverOptions
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.random_graphs import stacked
from tests.passes.traced import annotated_joint, fake, transformer


def layers(count: int, widths=None) -> Builder:
    """x + down(exp(up(x))), `count` times, between an entry and an exit."""
    b = Builder()
    x = b.call(aten.tanh.default, V(b.input((8, 4))))
    for k in range(count):
        b.block = f"net.layers.{k}"
        width = 16 if widths is None else widths[k]
        up, down = b.input((4, width), "parameter"), b.input((width, 4), "parameter")
        h = b.call(aten.mm.default, V(x), V(up))
        h = b.call(aten.exp.default, V(h))
        h = b.call(aten.mm.default, V(h), V(down))
        x = b.call(aten.add.Tensor, V(x), V(h))
    b.block = ""
    b.call(aten.exp.default, V(x))
    return b


def classes(b: Builder, fold=True) -> tuple[list[int], list[str]]:
    graph = b.finish([len(b.values) - 1])
    return classes_of(groups_of(graph), graph, fold)


def test_the_same_group_of_every_layer_is_one_class():
    numbers, names = classes(layers(3))
    assert numbers == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert names[0] == "op_0" and names[1].startswith("net.layers.*:") and len(set(names)) == 6


def test_without_folding_every_group_is_a_class():
    numbers, names = classes(layers(3), fold=False)
    assert numbers == list(range(14)) and len(names) == 14


def test_layers_that_differ_are_not_folded():
    numbers, _ = classes(layers(3, widths=[16, 16, 32]))
    assert numbers[1:5] == numbers[5:9] and not set(numbers[9:12]) & set(numbers[1:9])
    assert numbers[12] == numbers[4]  # but what they have in common is


def test_equal_groups_in_one_block_stay_apart():
    b = Builder()
    x = b.call(aten.tanh.default, V(b.input((8, 4))))
    for k in range(2):
        b.block = f"layers.{k}"
        for _ in range(2):
            x = b.call(aten.mm.default, V(x), V(b.input((4, 4), "parameter")))
    numbers, _ = classes(b)
    assert numbers == [0, 1, 2, 1, 2]


def test_what_one_layer_alone_keeps_for_backward_sets_it_apart():
    b = Builder()
    x = b.call(aten.tanh.default, V(b.input((8, 4))))
    for k in range(3):
        b.block = f"layers.{k}"
        x = b.call(aten.mm.default, V(x), V(b.input((4, 4), "parameter")))
        x = b.call(aten.exp.default, V(x))
    b.block, b.backward = "", True
    b.call(aten.tanh.default, V(x))  # needs the last product, since the exponential is recomputed
    graph = b.finish([len(b.values) - 1])
    placed = solve_on_mesh(graph, axes_of(2), Prices(latency=(1e3,)))  # everything whole
    assert placed.cost.activation_bytes == 8 * 4 * 4
    assert sorted(e.multiplicity for e in placed.problem.problem.entities if ":op_" in e.name) == [1, 2, 3]


def test_the_kind_of_what_is_read_and_the_phase_count():
    for change in ("kind", "backward", "trainable"):
        b = Builder()
        for k in range(2):
            b.block = f"layers.{k}"
            if change == "backward":
                b.backward = k == 1
            w = b.input((4, 4), "buffer" if change == "kind" and k else "parameter")
            b.values[w] = replace(b.values[w], trainable=change != "trainable" or k == 0)
            b.call(aten.mm.default, V(b.input((8, 4))), V(w))
        numbers, _ = classes_of(groups_of(graph := b.finish([])), graph)
        assert numbers == [0, 1], change


def problem(graph, sizes=(2,), prices=None, fold=True) -> PlacementProblem:
    return PlacementProblem(graph, axes_of(*sizes), prices or Prices(), fold=fold)


def test_multiplicities_count_the_instances():
    b = layers(5)
    built = problem(b.finish([len(b.values) - 1]))
    counts = {e.name: e.multiplicity for e in built.problem.entities if e.kind == "operations"}
    assert sorted(counts.values()) == [1, 1, 5, 5, 5, 5]
    parameters = [e.multiplicity for e in built.problem.entities if e.kind == "parameter"]
    assert sorted(parameters) == [5, 5]
    assert sum(e.multiplicity for e in problem(b.finish([len(b.values) - 1]), fold=False).problem.entities) == sum(
        e.multiplicity for e in built.problem.entities)


def size(built: PlacementProblem) -> tuple[int, ...]:
    """Entities, edges, choices, arcs: what the ILP is made of, before its reduction looks at prices."""
    entities, edges = built.problem.entities, built.problem.edges
    return len(entities), len(edges), sum(len(e.choices) for e in entities), sum(len(e.arcs) for e in edges)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_the_problem_does_not_grow_with_depth(sizes):
    seen = set()
    for count in (3, 4, 9):
        b = layers(count)
        seen.add(size(problem(b.finish([len(b.values) - 1]), sizes)))
    assert len(seen) == 1


@settings(max_examples=60, deadline=None)
@given(stacked(), st.sampled_from([0.01, 0.3]))
def test_tied_choices_are_never_cheaper_and_cost_what_they_say(graph, per_byte):
    """`solve_on_mesh` recomputes every answer on the unfolded graph and raises if it differs."""
    prices = Prices(us_per_byte=(per_byte, per_byte))
    options = SolverOptions(gap=0.0)
    tied = solve_on_mesh(graph, axes_of(2), prices, options=options)
    free = solve_on_mesh(graph, axes_of(2), prices, options=options, fold=False)
    assert tied.cost.step >= free.cost.step * (1 - 1e-9)
    assert len(tied.problem.problem.entities) <= len(free.problem.problem.entities)
    if len(tied.problem.problem.entities) == len(free.problem.problem.entities):
        assert tied.cost.step == pytest.approx(free.cost.step, rel=1e-9)


def test_equal_layers_lose_nothing_by_choosing_alike():
    b = layers(4)
    graph = b.finish([len(b.values) - 1])
    prices = Prices(us_per_flop=1.0)
    tied, free = (solve(problem(graph, prices=prices, fold=fold).problem, SolverOptions(gap=0.0)) for fold in (1, 0))
    assert tied.cost == pytest.approx(free.cost, rel=1e-9)
    assert any(e.multiplicity == 4 for e in problem(graph).problem.entities)


@pytest.fixture(scope="module")
def deep():
    """Number of layers -> the placement graph of a small transformer."""
    found = {}
    for count in (3, 4, 8):
        with fake():
            model, batch = transformer(vocabulary=64, width=16, heads=2, layers=count, rows=4, length=8)
            found[count] = annotated_joint(model, *batch).graph
    return found


def test_a_transformer_of_any_depth_gives_a_problem_of_one_size(deep):
    prices = MeshPrices(mesh_from_pin({"x": 2, "y": 2}, Cluster.parse("1x4:a100-80g")), 2)
    sizes, variables, operations = set(), [], []
    for graph in deep.values():
        built = PlacementProblem(graph, axes_of(2, 2), prices)
        sizes.add(size(built))
        variables.append(ilp.build(reduce(built.problem)).variables)
        operations.append(len(graph.operations))
    assert len(sizes) == 1, sizes
    assert max(variables) <= 1.02 * min(variables), variables  # what the reduction can drop depends on prices
    assert operations[2] - operations[1] == 4 * (operations[1] - operations[0])


def test_the_cost_of_a_transformer_grows_by_the_same_with_every_layer(deep):
    prices = MeshPrices(mesh_from_pin({"x": 4}, Cluster.parse("1x4:a100-80g")), 2)
    costs = {n: solve_on_mesh(graph, axes_of(4), prices, options=SolverOptions(gap=0.0)).cost for n, graph in deep.items()}
    per_layer = costs[4].step - costs[3].step
    assert costs[8].step == pytest.approx(costs[4].step + 4 * per_layer, rel=1e-6)
