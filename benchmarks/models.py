"""The models that are trained; `common.build` loads this file anew for every contender."""
from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Module):
    """Two wide layers; returns the loss, so that nothing else has to be gathered."""

    def __init__(self, width: int = 512, hidden: int = 2048, layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)}) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](nn.functional.gelu(layer["up"](x)))
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm1(x)
        q, k, v = (f(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small decoder that returns its loss."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 8, vocab: int = 2048, length: int = 128):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if name == "mlp_wide":
        return MLP(1024, 4096, 2), (torch.randn(16, 1024),)
    if name == "mlp_batch":
        return MLP(128, 256, 3), (torch.randn(4096, 128),)
    ids = torch.randint(0, 2048, (8, 128))
    return GPT(), (ids, ids.roll(-1, 1))
