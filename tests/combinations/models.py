"""Small models of six kinds: how each is built from a number of blocks, and a batch of it."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH, WIDTH, HIDDEN, WORDS, SIDE = 16, 8, 32, 64, 32, 8


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        scores = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), self.dropout, self.training)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Each token is computed by the two of four experts that its gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) * 0.2) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.topk(2, -1)
        shares = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        each = torch.einsum("rleh,ehw->rlew", F.silu(torch.einsum("rlw,ewh->rleh", x, self.up)), self.down)
        return x + (shares.unsqueeze(-1) * each).sum(2)


class Checkpointed(nn.Module):
    """The user's own activation checkpointing, of a block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Feedforward(), nn.LayerNorm(WIDTH)

    def _run(self, x):
        return F.dropout(self.inner(self.norm(x)), 0.2, self.training)

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=False)


class LanguageModel(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], depth: int, tied: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    """Residual blocks with BatchNorm, whose buffers forward changes, and dropout before the classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH // 2, 3, padding=1), nn.Linear(WIDTH // 2, WORDS)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv2d(WIDTH // 2, WIDTH // 2, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH // 2)) for _ in range(depth))

    def forward(self, pixels):
        x = self.stem(pixels)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(F.dropout(x.mean((2, 3)), 0.2, self.training))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "dropout": lambda depth: LanguageModel(lambda: Attention(0.2), depth),
    "tied": lambda depth: LanguageModel(lambda: Attention(0.0), depth, tied=True),
    "perceptron": lambda depth: LanguageModel(Feedforward, depth),
    "convnet": ConvNet,
    "experts": lambda depth: LanguageModel(Experts, depth),
    "checkpointed": lambda depth: LanguageModel(Checkpointed, depth),
}


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    if name == "convnet":
        return torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(0, WORDS, (ROWS,))
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    return ids, ids.roll(-1, 1)
