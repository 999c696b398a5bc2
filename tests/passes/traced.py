"""Joint graphs with their annotations for planning, for tests; models may be fake, so that they can be large."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from passes import compat
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.presets import annotate
from passes.tracing.joint_trace import JointTrace, call_arguments, joint_graphs


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Models and batches made in it have shapes but no data."""
    with compat.tracing_fake_mode():
        yield


def trace_joint(model: Callable[..., Any], *batch: Any) -> JointTrace:
    """The joint graph of `model(*batch)`; its first one, if Dynamo breaks it."""
    return joint_graphs(model, batch)[0]


def joint_graph(model: nn.Module, batch: Any, dynamic: bool | None = None) -> tuple[fx.GraphModule, int]:
    """The joint graph of a model on a batch, as the backend gets it, and how many of its outputs are forward's."""
    args, kwargs = call_arguments(batch)
    joint = joint_graphs(model, args, kwargs, dynamic=dynamic)[0]
    return joint.gm, joint.forward_outputs


def annotated_joint(model: Callable[..., Any], *batch: Any) -> AnalyzedGraph:
    """That graph, normalized, with what planning needs to know of it."""
    joint = trace_joint(model, *batch)
    return annotate(joint.gm, joint.inputs, joint.forward_outputs)


def mlp(width: int, hidden: int, layers: int = 2) -> nn.Module:
    """Residual blocks of two matrix products, and a loss."""
    return _MLP(width, hidden, layers)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList([_Block(width, hidden) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def transformer(vocabulary: int, width: int, heads: int, layers: int, rows: int, length: int) -> tuple[nn.Module, tuple]:
    """A causal language model that returns its loss, and a batch of tokens and labels."""
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return _Transformer(vocabulary, width, heads, layers), (tokens, tokens.clone())


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = [p.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
                   for p in self.qkv(self.norm1(x)).chunk(3, -1)]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([_Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
