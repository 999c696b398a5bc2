"""Train a small GPT on the characters of a novel: an ordinary script for one device, except for the backend's name.

    python train.py                     # on one device
    hpml run --nproc 2 train.py         # the same script on two
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = Path(__file__).with_name("persuasion.txt")
VOCABULARY = 128  # ASCII


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # batch, position, 3, head, dim
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, characters: Tensor, targets: Tensor) -> Tensor:
        x = self.characters(characters) + self.positions(torch.arange(characters.shape[1], device=characters.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the characters of a novel.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="characters in a row of the batch")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--options", type=json.loads, help="options of the backend, as JSON")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    model = GPT(args.width, args.width // 64, args.layers, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)

    compiled = torch.compile(model, backend="hpml", options=args.options)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length, (args.batch,))
        rows = torch.stack([text[start : start + args.length + 1] for start in starts.tolist()])
        loss = compiled(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {loss.item():.8f}", flush=True)


if __name__ == "__main__":
    main()
