"""The GPT models of published throughput tables, on the meta device: to be planned, never run.

Each function without arguments returns `(model, batch)` and is a TARGET (`published_models.py:gpt_1_7b`). `batch` is the
global batch; the model returns the loss alone, since no trainer gathers the logits.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SEQUENCE, VOCABULARY = 2048, 51200


class Block(nn.Module):
    """A pre-norm transformer layer with biases and a 4x feed-forward part, as GPT-2 and Megatron have it.

    unfused: attention as kernels of their own for scores, scaled and masked softmax, dropout and the weighted sum, as
    trainers ran it before FlashAttention: its (rows, heads, sequence, sequence) scores go through memory each time.
    """

    def __init__(self, hidden: int, heads: int, unfused: bool, dropout: float):
        super().__init__()
        self.heads, self.unfused, self.dropout = heads, unfused, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, sequence, hidden) -> the same shape, before the output projection."""
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        if not self.unfused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -10000.0).softmax(dim=-1)
        return (F.dropout(weights, self.dropout) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.out(self.attention(self.norm1(x))), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.dropout)


class GPT(nn.Module):
    """A decoder with learned positions and tied embeddings; returns the mean cross-entropy, taken in float32."""

    def __init__(self, hidden: int, layers: int, heads: int, unfused: bool, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(SEQUENCE, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, unfused, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gpt(hidden: int, layers: int, heads: int, batch: int, unfused: bool = True, dropout: float = 0.0):
    """A GPT in bfloat16 on the meta device and a batch of token ids, (batch, SEQUENCE)."""
    with torch.device("meta"):
        model = GPT(hidden, layers, heads, unfused, dropout).to(torch.bfloat16)
        ids = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    return model, (ids, ids)


def gpt_1_7b():
    """1.7B: 1-way tensor, 1-way pipeline, 32-way data parallel."""
    return gpt(2304, 24, 24, batch=512)


def gpt_3_6b():
    """3.6B: 2-way tensor, 1-way pipeline, 32-way data parallel."""
    return gpt(3072, 30, 32, batch=512)


def gpt_7_5b():
    """7.5B: 4-way tensor, 1-way pipeline, 32-way data parallel."""
    return gpt(4096, 36, 32, batch=512)


def gpt_18_4b():
    """18.4B: 8-way tensor, 1-way pipeline, 32-way data parallel."""
    return gpt(6144, 40, 48, batch=1024)


def gpt_39_1b():
    """39.1B: 8-way tensor, 2-way pipeline, 32-way data parallel."""
    return gpt(8192, 48, 64, batch=1536)


def gpt_76_1b():
    """76.1B: 8-way tensor, 4-way pipeline, 32-way data parallel."""
    return gpt(10240, 60, 80, batch=1792)


def gpt_145_6b():
    """145.6B: 8-way tensor, 8-way pipeline, 24-way data parallel."""
    return gpt(12288, 80, 96, batch=2304)


def gpt_310_1b():
    """310.1B: 8-way tensor, 16-way pipeline, 15-way data parallel."""
    return gpt(16384, 96, 128, batch=2160)


def gpt_529_6b():
    """529.6B: 8-way tensor, 35-way pipeline, 9-way data parallel."""
    return gpt(20480, 105, 128, batch=2520)


def gpt_1008b():
    """1008B: 8-way tensor, 64-way pipeline, 6-way data parallel."""
    return gpt(25600, 128, 160, batch=3072)


def gpt_22b():
    """22B: 8-way tensor parallel."""
    return gpt(6144, 48, 64, batch=4, dropout=0.1)


def gpt_175b():
    """175B: 8-way tensor, 8-way pipeline."""
    return gpt(12288, 96, 96, batch=64, dropout=0.1)


def gpt_530b():
    """530B: 8-way tensor, 35-way pipeline."""
    return gpt(20480, 105, 128, batch=280, dropout=0.1)


def gpt_1t():
    """1T: 8-way tensor, 64-way pipeline."""
    return gpt(25600, 128, 160, batch=512, dropout=0.1)
