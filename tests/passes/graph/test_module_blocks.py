"""Blocks of the nodes of a joint graph: module stacks and sequence numbers before -> block paths after."""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from passes.graph.module_blocks import assign_blocks, assign_modules, block_of, clean_path
from passes.graph.placement_graph import block_class
from passes.graph.step_phase import BACKWARD
from tests.passes.traced import annotated_joint


@pytest.mark.parametrize(("path", "clean"), [
    ("L['self'].model.layers[3]", "model.layers.3"),
    ("L['model']._modules['h'][0].attn", "h.0.attn"),
    ("L['self']._modules['layers']._modules['11']", "layers.11"),
    ("L['self']._orig_mod.blocks[2]", "blocks.2"),
    ("L['self'].blocks['3']", "blocks.3"),
    ("", ""),
])
def test_paths_are_cleaned(path, clean):
    assert clean_path(path) == clean


@pytest.mark.parametrize(("block", "starred"), [
    ("model.layers.3", "model.layers.*"), ("h.0.mlp.1", "h.*.mlp.*"), ("conv2d", "conv2d"), ("", ""), ("7", "*"),
])
def test_blocks_of_one_class_differ_in_their_index_only(block, starred):
    assert block_class(block) == starred


class Layer(nn.Module):
    pass


def node(graph: fx.Graph, *args: fx.Node, stack=(), number=None, backward=False, gradient_sum=False) -> fx.Node:
    new = graph.call_function(torch.ops.aten.add.Tensor, (args[0], args[-1]))
    new.meta.update({
        "nn_module_stack": {str(k): entry for k, entry in enumerate(stack)}, "seq_nr": number,
        "partitioner_tag": "is_backward" if backward else "is_forward",
    })
    if gradient_sum:
        new.meta["is_gradient_acc"] = True
    return new


OUTER = ("L['self'].layers[1]", Layer)
INNER = ("L['self'].layers[1].experts[2]", Layer)


@pytest.mark.parametrize(("stack", "block"), [
    ([("L['self']", Layer), OUTER, INNER], "layers.1"),  # the outermost one
    ([("L['self'].net[0]", nn.Linear)], ""),  # a step of a chain
    ([("L['self'].net[0]", nn.Sequential), ("L['self'].net[0][1]", nn.Linear)], "net.0"),
    ([("L['self'].encoder.layers[4]", nn.TransformerEncoderLayer)], "encoder.layers.4"),
    ([("L['self'].h.3", "transformers.models.gpt2.GPT2Block")], "h.3"),
    ([("L['self'].fc", nn.Linear)], ""),
    ([], ""),
])
def test_a_block_is_the_outermost_indexed_module_with_parts(stack, block):
    graph = fx.Graph()
    assert block_of(node(graph, graph.placeholder("x"), stack=stack)) == block


@pytest.mark.parametrize(("assign", "inner", "around", "found"), [
    (assign_blocks, [OUTER], [], "layers.1"),
    (assign_modules, [("L['self']", Layer), ("L['self'].lm_head", nn.Linear)], [("L['self']", Layer)], "lm_head"),
])
def test_backward_nodes_belong_where_their_forward_node_does(assign, inner, around, found):
    graph = fx.Graph()
    x = graph.placeholder("x")
    one = node(graph, x, stack=inner, number=7)
    loss = node(graph, one, stack=around, number=8)
    d_loss = node(graph, loss, number=8, backward=True)
    d_one = node(graph, d_loss, number=7, backward=True)
    places = assign(fx.GraphModule({}, graph))
    assert [places[n] for n in (one, loss, d_loss, d_one)] == [found, "", "", found]


def test_a_sum_of_gradients_belongs_to_its_last_summand_whatever_number_it_carries():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = node(graph, x, stack=[("L['self'].layers[0]", Layer)], number=1)
    second = node(graph, first, stack=[OUTER], number=2)
    last = node(graph, second, number=3)
    g2 = node(graph, last, number=2, backward=True)
    g1 = node(graph, g2, number=1, backward=True)
    total = node(graph, g1, g2, number=3, backward=True, gradient_sum=True)
    unnumbered = node(graph, g2, g1, backward=True)
    blocks = assign_blocks(fx.GraphModule({}, graph))
    assert blocks[total] == blocks[unnumbered] == "layers.0"


def test_a_backward_node_whose_forward_node_is_gone_belongs_where_its_input_does():
    graph = fx.Graph()
    x = graph.placeholder("x")
    forward = node(graph, x, stack=[OUTER], number=1)
    g = node(graph, forward, number=1, backward=True)
    turned = node(graph, g, number=99, backward=True)
    assert assign_blocks(fx.GraphModule({}, graph))[turned] == "layers.1"


class Attention(nn.Module):
    """Its views are copied for every product by normalization, so that no forward node keeps their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (p.view(2, 4, 2, 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_every_heavy_operation_of_a_real_model_is_in_its_layer():
    graph = annotated_joint(Layers(), torch.randn(2, 4, 8)).graph
    counts = {name: sum(op.block == name for op in graph.operations if op.phase == BACKWARD)
              for name in ("layers.0", "layers.1", "layers.2")}
    assert counts["layers.1"] == counts["layers.2"] >= counts["layers.0"] > 10  # nobody asks for the input's gradient
    assert all(op.block for op in graph.operations if op.heavy)
    views = [op for op in graph.operations if op.kind == "view" and op.phase == BACKWARD]
    assert all(op.block for op in views if "permute" in op.target)


def test_backward_of_a_division_in_place_is_in_its_block():
    """It reads forward values alone, and its forward call is gone."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = (node(graph, x, stack=[(f"L['self'].layers[{k}]", Layer)], number=k) for k in range(2))
    quotient = node(graph, two, one, number=7, backward=True)
    again = node(graph, quotient, two, number=7, backward=True)
    graph.output(again)
    blocks = assign_blocks(fx.GraphModule(nn.Module(), graph))
    assert [blocks[each] for each in (one, two, quotient, again)] == ["layers.0", "layers.1", "layers.1", "layers.1"]
