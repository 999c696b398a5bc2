"""Annotations: typed keys, frozen values, and no way to change somebody else's."""
from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import fx

from passes.annotations import (
    AnnotationError,
    Key,
    annotations_of,
    drop,
    has,
    keys_on,
    missing,
    read,
    write,
)

COST = Key("cost", float)
LABEL = Key("label", str, scope="graph")


@dataclass(frozen=True)
class Frozen:
    items: object


@dataclass
class Thawed:
    items: object


@pytest.fixture
def graph_module() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: torch.neg(torch.neg(x)))


def _calls(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.op == "call_function"]


def test_what_is_written_is_read(graph_module):
    first, second = _calls(graph_module)
    write(COST, first, 1.5)
    write(LABEL, graph_module, "small")
    assert read(COST, first) == 1.5
    assert read(LABEL, graph_module) == "small"
    assert not has(COST, second)
    assert keys_on(graph_module) == {COST, LABEL}


def test_a_graph_has_a_node_key_when_every_selected_node_has_it(graph_module):
    first, second = _calls(graph_module)
    write(COST, first, 1.0)
    assert not has(COST, graph_module)
    assert missing(COST, graph_module) == [second]
    write(COST, second, 1.0)
    assert has(COST, graph_module)
    inputs = Key("cost", float, selects=lambda node: node.op == "placeholder")
    assert not has(inputs, graph_module)


def test_dropping_from_a_graph_drops_from_its_nodes(graph_module):
    for node in _calls(graph_module):
        write(COST, node, 1.0)
    write(LABEL, graph_module, "small")
    drop(COST, graph_module)
    assert keys_on(graph_module) == {LABEL}
    drop(LABEL, graph_module)
    assert keys_on(graph_module) == set()


def test_a_shallow_copy_of_meta_shares_nothing(graph_module):
    first, second = _calls(graph_module)
    write(COST, first, 1.0)
    second.meta = dict(first.meta)  # as FX copies it
    write(COST, second, 2.0)
    drop(COST, first)
    assert read(COST, second) == 2.0
    assert not has(COST, first)


def test_a_deep_copy_of_the_graph_module_keeps_annotations_apart(graph_module):
    write(LABEL, graph_module, "small")
    write(COST, _calls(graph_module)[0], 1.0)
    twin = copy.deepcopy(graph_module)
    write(LABEL, twin, "large")
    write(COST, _calls(twin)[0], 2.0)
    assert (read(LABEL, graph_module), read(COST, _calls(graph_module)[0])) == ("small", 1.0)
    assert (read(LABEL, twin), read(COST, _calls(twin)[0])) == ("large", 2.0)


def test_annotations_cannot_be_assigned_and_survive_pickling(graph_module):
    write(Key("size", int, scope="graph"), graph_module, 3)
    held = annotations_of(graph_module)
    with pytest.raises(TypeError, match="item assignment"):
        held[LABEL] = "small"
    write(LABEL, graph_module, "small")
    assert LABEL not in held
    assert pickle.loads(pickle.dumps(held)) == held


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (float, 1),
        (tuple[int, ...], (1, 2)),
        (tuple[int, ...], ()),
        (tuple[str, int], ("a", 1)),
        (frozenset[str], frozenset({"a"})),
        (Literal["S", "R"], "R"),
        (Frozen, Frozen((1, ("a", None)))),
        (torch.dtype, torch.float32),
    ],
)
def test_values_of_the_keys_type_are_taken(graph_module, value_type, value):
    key = Key("k", value_type, scope="graph")
    write(key, graph_module, value)
    assert read(key, graph_module) == value


@pytest.mark.parametrize("value", [None, 3])
def test_a_union_takes_each_of_its_types(graph_module, value):
    write(Key("k", int | None, scope="graph"), graph_module, value)


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (float, "1"),
        (int, 1.0),
        (int, True),
        (float, False),
        (tuple[int, ...], (1, "2")),
        (tuple[int, ...], [1, 2]),
        (tuple[str, int], ("a", 1, 2)),
        (frozenset[str], frozenset({1})),
        (Literal["S", "R"], "P"),
        (int | None, "x"),
    ],
)
def test_values_of_another_type_are_refused(graph_module, value_type, value):
    key = Key("k", value_type, scope="graph")
    with pytest.raises(AnnotationError, match=r"annotation 'k' takes .*, got"):
        write(key, graph_module, value)
    assert not has(key, graph_module)


@pytest.mark.parametrize(
    "value",
    [
        [1],
        {"a": 1},
        (1, ({2},)),
        Thawed(1),
        Frozen([1]),
        torch.zeros(1),
        (torch.nn.ReLU(),),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_could_change_are_refused(graph_module, value):
    with pytest.raises(AnnotationError, match="not frozen: it holds a"):
        write(Key("k", object, scope="graph"), graph_module, value)


def test_a_node_is_refused_as_a_value(graph_module):
    with pytest.raises(AnnotationError, match="(?s)not frozen.*for a node its name"):
        write(Key("k", object, scope="graph"), graph_module, (_calls(graph_module)[0],))


def test_errors_say_what_and_where(graph_module):
    node = _calls(graph_module)[0]
    with pytest.raises(AnnotationError, match=r"(?s)no annotation 'cost'.*node %neg .*next step: run a pass"):
        read(COST, node)
    with pytest.raises(AnnotationError, match="(?s)'cost' belongs to a node.*GraphModule"):
        write(COST, graph_module, 1.0)
    with pytest.raises(AnnotationError, match="(?s)'label' belongs to a graph module.*node %neg"):
        read(LABEL, node)
    with pytest.raises(AnnotationError, match="'cost' is not a Key"):
        read("cost", node)


def test_keys_are_equal_by_name_type_and_scope():
    assert Key("cost", float) == COST
    assert Key("cost", int) != COST
    assert Key("cost", float, scope="graph") != COST
    assert pickle.loads(pickle.dumps(COST)) == COST


@pytest.mark.parametrize("arguments", [("my cost", float), ("cost", float, "edge")])
def test_keys_with_a_bad_name_or_scope_are_refused(arguments):
    with pytest.raises(AnnotationError, match="name for a key|unknown scope"):
        Key(*arguments)
