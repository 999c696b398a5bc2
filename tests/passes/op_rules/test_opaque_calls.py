"""Calls that rules cannot look into; results that come in lists within lists."""
from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.op_rules.opaque_calls import is_opaque, leaves_of, port_of

aten = torch.ops.aten


def traced(function, *examples):
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        return make_fx(function, tracing_mode="symbolic")(*examples).graph


def opaque(graph):
    return {node.name for node in graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem and is_opaque(node)}


def test_ordinary_calls_are_not_opaque():
    graph = make_fx(lambda x: torch.topk(x.sin() @ x, 2)[0], tracing_mode="fake")(torch.ones(4, 4)).graph
    assert not opaque(graph)


def test_sizes_that_depend_on_data_go_on_until_they_are_summed_away():
    def picked(x):
        rows = x.nonzero()
        return rows.sum(0) + 1, x + 1

    names = opaque(traced(picked, torch.ones(4)))
    assert {"nonzero", "sum_1"} <= names
    assert not {"add", "add_1"} & names


def test_results_are_counted_through_lists():
    assert leaves_of((1, [2, None, (3,)])) == [((0,), 1), ((1, 0), 2), ((1, 1), None), ((1, 2, 0), 3)]
    assert leaves_of(7) == [((), 7)]
    graph = fx.Graph()
    call = graph.call_function(aten.sin.default, ())
    call.meta["val"] = (1, [2, None, (3,)])
    second = graph.call_function(operator.getitem, (call, 1))
    third = graph.call_function(operator.getitem, (graph.call_function(operator.getitem, (second, 2)), 0))
    assert port_of(graph.call_function(operator.getitem, (call, 0))) == (call, 0)
    assert port_of(graph.call_function(operator.getitem, (second, 0))) == (call, 1)
    assert port_of(third) == (call, 3)
    assert port_of(second) is None, "a list, no tensor"
