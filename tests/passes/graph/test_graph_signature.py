"""A joint graph and its Dynamo graph's inputs -> the role of each placeholder and output."""
from __future__ import annotations

import torch
from torch import nn

from passes.graph.graph_signature import GraphInput, signature_of
from tests.passes.traced import joint_graph


class Prints(nn.Module):
    """An effect, for which the graph has one more input, the first one. Since torch 2.13 checks of torch.linalg are others."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        torch.ops.aten._print("seen")
        return self.a @ x * self.b


def test_a_token_of_effects_is_no_input_of_the_model():
    joint, forward_outputs = joint_graph(Prints(), (torch.randn(4, 3),))
    values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    assert [tuple(value.shape) for value in values[:-1]] == [(0,), (4, 4), (4, 3), (3,)]  # then the tangent
    inputs = [GraphInput("a", "parameter", True, True), GraphInput("x", "batch"), GraphInput("b", "parameter", True, True)]
    interface = signature_of(joint, inputs, forward_outputs)
    shapes = {node.name: tuple(node.meta["val"].shape) for node in joint.graph.nodes
              if isinstance(node.meta.get("val"), torch.Tensor)}
    assert {interface.names[name]: shapes[name] for name in interface.names} == {"a": (4, 4), "b": (3,)}
    assert {interface.names[owner]: shapes[name] for name, owner in interface.outputs if owner} == {
        "a": (4, 4), "b": (3,)}, "each gradient belongs to its parameter"
