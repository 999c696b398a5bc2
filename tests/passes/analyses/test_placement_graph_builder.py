"""A joint graph before -> operations with strategies and values with factors after."""
from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from passes.analyses.placement_graph_builder import build_placement_graph
from passes.graph.step_phase import BACKWARD
from passes.op_rules.rule_table import operator_of
from tests.passes.traced import annotated_joint, mlp

aten = torch.ops.aten


@pytest.fixture(scope="module")
def annotated():
    return annotated_joint(mlp(8, 16, 1), torch.randn(4, 8))


@pytest.mark.parametrize(("target", "kind"), [
    (aten.mm.default, "matmul"), (aten.bmm.default, "matmul"), (aten.convolution.default, "convolution"),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, "attention"), (aten.embedding.default, "embedding"),
    (aten.permute.default, "view"), (aten.view.default, "view"), (operator.getitem, "view"),
    (aten.gelu.default, "pointwise"), (aten.sum.dim_IntList, "pointwise"),
])
def test_kinds(target, kind):
    assert operator_of(target).kind == kind


def test_every_call_is_an_operation_in_order_and_every_tensor_a_value(annotated):
    calls = [n for n in annotated.gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    graph = annotated.graph
    assert [op.name for op in graph.operations] == [n.name for n in calls]
    assert [v.index for v in graph.values] == list(range(len(graph.values)))
    for op, node in zip(graph.operations, calls):
        assert [graph.values[v].name for v in op.inputs] == [
            x.name for x in node.args if isinstance(x, torch.fx.Node)]
        assert graph.values[op.outputs[0]].spec.shape == tuple(node.meta["val"].shape)
        assert (op.phase == BACKWARD) == (node.meta["partitioner_tag"] == "is_backward")
        assert all(len(s.inputs) == len(op.inputs) and len(s.outputs) == len(op.outputs) for s in op.strategies)
        assert not op.strategies[0].splits, "the replicated strategy comes first"
    for value in graph.values:
        assert value.users == tuple(op.index for op in graph.operations if value.index in op.inputs)


def test_inputs_and_gradients_are_named_by_what_they_are(annotated):
    graph, interface = annotated.graph, annotated.interface
    kinds = {v.name: v.kind for v in graph.values if v.producer is None}
    parameters = {n: graph.values[i].name for i, n in
                  ((v.index, interface.names.get(v.name)) for v in graph.values) if n}
    assert sorted(parameters) == ["blocks.0.down.weight", "blocks.0.up.weight"]
    assert sorted(kinds.values()) == ["batch", "parameter", "parameter", "tangent"]
    assert all(v.trainable == (v.kind == "parameter") for v in graph.values if v.producer is None)
    gradients = [(graph.values[g].spec.shape, graph.values[p].spec.shape) for g, p in graph.outputs if p is not None]
    assert gradients == [((16, 8), (16, 8)), ((8, 16), (8, 16))]
    assert [p for _, p in graph.outputs].count(None) == 1  # the loss
    forward, backward = (
        sum(op.flops for op in graph.operations if op.heavy and (op.phase == BACKWARD) is b) for b in (False, True))
    assert (forward, backward) == (2 * 2 * 4 * 8 * 16, 3 * 2 * 4 * 8 * 16)  # no gradient of the first input


def test_partial_sums_never_start_at_an_input_nor_enter_whole_products(annotated):
    graph = annotated.graph
    for op in graph.operations:
        for s in op.strategies:
            partial = [v for v, p in zip(op.inputs, s.inputs) if p in ("P", "M")]
            assert all(graph.values[v].producer is not None for v in partial)
            assert not (partial and op.heavy and not s.splits)
    assert any("P" in s.inputs for op in graph.operations for s in op.strategies), "else this test says nothing"


def graph_of(function, *shapes, kinds=None):
    """The placement graph of a plain FX graph; `function` calls aten operators."""
    traced = torch.fx.symbolic_trace(function)
    fakes = iter([torch.empty(s, device="meta") for s in shapes])
    env = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = node.meta["val"] = next(fakes)
        elif node.op == "call_function":
            args = torch.fx.map_arg(node.args, env.__getitem__)
            env[node] = node.meta["val"] = node.target(*args, **node.kwargs)
    (output,) = traced.graph.find_nodes(op="output")
    names = [n.name for n in traced.graph.find_nodes(op="placeholder")]
    return build_placement_graph(
        traced, dict(zip(names, kinds or ["batch"] * len(names))), [(n.name, None) for n in output.args[0]], lambda node: 0.0)


def test_several_results_are_values_of_their_own_and_getitem_is_none():
    graph, _ = graph_of(lambda x: (aten.max.dim(x, 1)[1],), (4, 6))
    (op,) = graph.operations
    assert [graph.values[v].name for v in op.outputs] == ["max_dim.0", "max_dim.1"]
    assert graph.outputs == ((op.outputs[1], None),)
    assert [graph.values[v].port for v in op.outputs] == [0, 1]


def test_what_is_read_twice_has_one_placement_and_one_entry_among_users():
    graph, _ = graph_of(lambda x: (aten.mm.default(x, x),), (4, 4))
    (op,) = graph.operations
    assert op.inputs == (0, 0) and graph.values[0].users == (0,)
    assert all(s.inputs[0] == s.inputs[1] for s in op.strategies)
    assert {s.inputs for s in op.strategies} == {("R", "R")}


def test_an_operator_without_a_rule_stays_whole_and_is_reported():
    graph, rules = graph_of(lambda x: (aten._pdist_forward.default(aten.exp.default(x)),), (4, 4))
    assert graph.unruled == {"aten._pdist_forward.default": ("_pdist_forward_default",)}
    assert rules[1] is None and not graph.operations[1].ruled
    assert [s.splits for s in graph.operations[1].strategies] == [False]
    assert any(s.splits for s in graph.operations[0].strategies)


def test_a_frozen_parameter_is_not_trainable_and_has_no_gradient():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[0].weight.requires_grad_(False)
    annotated = annotated_joint(model, torch.randn(2, 4))
    by_name = {annotated.interface.names[v.name]: v for v in annotated.graph.values if v.kind == "parameter"}
    assert {n: v.trainable for n, v in by_name.items()} == {"0.weight": False, "0.bias": True, "1.weight": True,
                                                            "1.bias": True}
    owned = {p for _, p in annotated.graph.outputs if p is not None}
    assert owned == {v.index for n, v in by_name.items() if n != "0.weight"}
