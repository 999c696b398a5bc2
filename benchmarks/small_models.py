"""Small models of several kinds for `gpu_pass.py`, each with a batch to train on, and nothing but torch.

`build(name)` returns `(model, batch)`: `model(**batch)` returns the loss, or a dict or object that has one.
"""
from __future__ import annotations

from typing import Any

import torch
from models import GPT, MLP
from torch import nn


class ConvNet(nn.Module):
    """A residual convolutional classifier with BatchNorm: buffers that the forward pass changes."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(pixels)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        logits = self.head(x.mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tied(nn.Module):
    """A tied embedding, a frozen layer, a buffer, a scalar parameter, and a constant made in forward."""

    def __init__(self, width: int = 64, vocab: int = 128):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(ids)) + self.shift + torch.arange(ids.shape[1], device=ids.device)[:, None] * 0.01
        x = x + self.gain * self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Biased(nn.Module):
    """Attention with a learned bias whose rows are not as long as kernels on a GPU want them, and a padding mask."""

    def __init__(self, width: int = 64, heads: int = 4, length: int = 10, vocab: int = 128):
        super().__init__()
        self.heads, self.embed = heads, nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.bias, self.head = nn.Parameter(torch.randn(heads, length, length)), nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        bias = self.bias + (ids == 0)[:, None, None, :] * -100.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _ids(*shape: int, vocab: int = 128) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, Any] = {
    "mlp": lambda: (MLP(64, 128, 2), {"x": torch.randn(16, 64)}),
    "gpt": lambda: (GPT(width=64, layers=2, heads=4, vocab=128, length=16), {"ids": _ids(8, 16), "labels": _ids(8, 16)}),
    "biased": lambda: (Biased(), {"ids": _ids(8, 10), "labels": _ids(8, 10)}),
    "convnet": lambda: (ConvNet(), {"pixels": torch.randn(8, 3, 16, 16), "labels": _ids(8, vocab=10)}),
    "tied": lambda: (Tied(), {"ids": _ids(8, 16), "labels": _ids(8, 16)}),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return MODELS[name]()
