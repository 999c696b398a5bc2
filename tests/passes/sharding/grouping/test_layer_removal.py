"""A graph with four equal layers before -> the graph with three, as if it had been made so, or none after."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.placement_graph import PlacementGraph, block_class
from passes.sharding.grouping.layer_removal import without_layers
from tests.passes.graphs import Builder, V, aten
from tests.passes.sharding.grouping.test_group_symmetry import layers
from tests.passes.traced import annotated_joint, mlp, transformer

THIRD = {"net.layers.2": "net.layers.1"}


def nameless(graph: PlacementGraph) -> PlacementGraph:
    """The same with every name by its place alone."""
    return PlacementGraph(
        tuple(replace(op, name=str(op.index), block=block_class(op.block)) for op in graph.operations),
        tuple(replace(v, name=str(v.index)) for v in graph.values), graph.outputs, saved=graph.saved)


def chain(count: int, **options) -> PlacementGraph:
    b = layers(count, **options)
    return b.finish([len(b.values) - 1])


def test_a_layer_of_a_chain_goes_and_its_neighbors_meet():
    spliced = without_layers(chain(4), THIRD)
    assert spliced is not None and nameless(spliced) == nameless(chain(3))
    assert [op.block for op in spliced.operations].count("net.layers.3") == 4


def deep_mlp(count: int) -> AnalyzedGraph:
    return annotated_joint(mlp(8, 32, count), torch.zeros(4, 8))


def deep_transformer(count: int) -> AnalyzedGraph:
    model, batch = transformer(64, 16, 2, count, 2, 8)
    return annotated_joint(model, *batch)


@pytest.mark.parametrize(("traced", "saves_alike"), [(deep_mlp, False), (deep_transformer, True)])
def test_four_traced_layers_without_one_are_three_traced_layers(traced, saves_alike):
    """saves_alike: whether the partitioner, which has several best cuts of the one model, cuts both depths alike."""
    four, three = traced(4), traced(3)
    paths = {op.block for op in four.graph.operations if op.block.endswith(".2")}
    assert len(paths) == 1
    (gone,) = paths
    spliced = without_layers(four.graph, {gone: f"{gone[:-1]}1"})
    assert spliced is not None and spliced.saved
    expected = three.graph if saves_alike else replace(three.graph, saved=spliced.saved)
    assert nameless(spliced) == nameless(expected)


def skipping(last: bool) -> PlacementGraph:
    """x -> exp(x) four times; what every layer makes, or the first alone, is read at the end again."""
    b = Builder()
    x = b.call(aten.tanh.default, V(b.input((8, 4))))
    made = []
    for k in range(4):
        b.block = f"net.layers.{k}"
        x = b.call(aten.exp.default, V(x))
        made.append(x)
    b.block = ""
    for v in made[:-1] if last else made[:1]:
        x = b.call(aten.add.Tensor, V(x), V(v))
    return b.finish([x])


def masked(alternate: bool) -> PlacementGraph:
    """Layers that multiply by a mask, all by one or every other by a second."""
    b = Builder()
    x, first, second = b.input((8, 4)), b.input((8, 4)), b.input((8, 4))
    for k in range(4):
        b.block = f"net.layers.{k}"
        x = b.call(aten.mul.Tensor, V(x), V(second if alternate and k % 2 else first))
    b.block = ""
    return b.finish([b.call(aten.exp.default, V(x))])


def test_what_all_layers_read_stays_and_what_is_not_handed_from_neighbor_to_neighbor_is_no_chain():
    assert without_layers(skipping(last=False), THIRD) is not None
    assert without_layers(skipping(last=True), THIRD) is None
    assert without_layers(masked(alternate=False), THIRD) is not None
    assert without_layers(masked(alternate=True), THIRD) is None
    assert without_layers(chain(4, widths=[16, 16, 32, 16]), THIRD) is None
    assert without_layers(chain(4), {"net.layers.9": "net.layers.8"}) is None


def test_layers_that_save_other_values_differ():
    graph = chain(4)
    (v,) = graph.operations[9].outputs
    assert graph.operations[9].block == "net.layers.2"
    assert without_layers(replace(graph, saved=frozenset({v})), THIRD) is None


def test_what_every_layer_returns_is_returned_by_one_less():
    b = Builder()
    x, returned = b.input((8, 4)), []
    for k in range(4):
        b.block = f"net.layers.{k}"
        weight = b.input((4, 4), "parameter")
        returned.append((b.call(aten.exp.default, V(weight)), weight))
        x = b.call(aten.mm.default, V(x), V(weight))
    b.block = ""
    loss = b.call(aten.exp.default, V(x))
    spliced = without_layers(b.finish([loss, *returned]), THIRD)
    assert spliced is not None and [p is None for _, p in spliced.outputs] == [True, False, False, False]
    assert all(spliced.values[p].kind == "parameter" for _, p in spliced.outputs[1:])
    assert without_layers(b.finish([loss, *returned[:2], returned[3]]), THIRD) is None
