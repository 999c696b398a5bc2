"""Roles of dims come from the rules of operators, whatever their position."""
from __future__ import annotations

import torch
from torch import nn

from passes.op_rules.dim_texts import parse_dims
from passes.sharding.dim_roles import dim_roles
from tests.passes.traced import annotated_joint


class Attention(nn.Module):
    """An embedding, one attention layer whose products have transposed weights, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32)
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Parameter(torch.randn(32, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, ids, labels):
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).view(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(x + y @ self.out).flatten(0, 1), labels.flatten())


def roles_of(model, *batch):
    """Roles of the dims by name, of parameters and of other values."""
    annotated = annotated_joint(model, *batch)
    graph = annotated.graph
    roles = dim_roles(graph, annotated.rules)
    names = annotated.interface.names
    parameters = {names[v.name]: roles.parameter_text(v.index) for v in graph.values if v.kind == "parameter"}
    return parameters, {v.name: roles.text(v.index) for v in graph.values if v.kind == "activation"}


def test_roles_of_a_language_model():
    ids = torch.randint(0, 96, (2, 16))
    parameters, values = roles_of(Attention(), ids, ids)
    assert parameters["table.weight"] == "96 vocabulary, 32 features"
    assert parameters["qkv.weight"] == "3 columns*4 heads*8 columns, 32 rows"
    assert parameters["out"] == "4 heads*8 rows, 32 columns"  # the dims of a weight that is not transposed
    assert parameters["head.weight"] == "96 vocabulary, 32 rows" and parameters["head.bias"] == "96 vocabulary"
    assert parameters["norm.weight"] == "32 features"
    assert values["embedding"] == "2 batch, 16 sequence, 32 features"
    attention = next(text for name, text in values.items() if name.startswith("_scaled_dot_product") and name.endswith(".0"))
    assert attention == "2 batch, 4 heads, 16 sequence, 8 features"


def test_convolutions_have_channels_and_a_batch_but_no_rows():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.second(self.first(x).relu()).square().mean()

    parameters, values = roles_of(Net(), torch.randn(2, 3, 8, 8))
    assert parameters["second.weight"] == "4 output channels, 8 input channels, 1, 1"
    assert parameters["first.bias"] == "8 output channels"
    assert values["relu"].startswith("2 batch, 8 channels, 8")


def test_text_and_back():
    assert parse_dims("16 batch*8192 sequence, 4096 output channels, 1") == (
        ((16, "batch"), (8192, "sequence")), ((4096, "output channels"),), ((1, ""),))
    assert parse_dims("") == ()
