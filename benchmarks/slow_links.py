"""Losses and bytes of the demo's model with compressed gradients, and with replicas that train apart, on CPUs over gloo.

    torchrun --nproc-per-node 2 benchmarks/slow_links.py [--steps 200] [--width 128] [--layers 4]

Each row: the case, bytes that a rank sends for gradients in backward and for averages in the optimizer's step, on average of
8 steps; losses, and the mean of the last ten.
"""
from __future__ import annotations

import argparse
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.demo.train import GPT, TEXT
from hpml_compiler.instruments.sent_bytes import SentBytes
from hpml_compiler.session import session

CASES: dict[str, dict[str, Any]] = {
    "none": {}, **{name: {"compress": {"dp": name}} for name in ("bf16", "fp16", "powersgd:4")},
    "local 8": {"local_steps": {"dp": 8}}, "diloco 8": {"local_steps": {"dp": 8}, "outer_optimizer": "nesterov"}}


COUNTED = 8
"""Steps whose bytes are counted: replicas are averaged in one of them."""


def train(options: dict[str, Any], steps: int, width: int, layers: int, length: int = 64, batch: int = 8,
          ) -> tuple[list[float], Counter[Any]]:
    """Losses, and the bytes that this rank sends for parameters and gradients in the last 8 steps, by collective and dtype."""
    torch._dynamo.reset()
    session.reset()
    torch.manual_seed(0)
    text, sent = torch.tensor(list(TEXT.read_bytes())), SentBytes()
    model = GPT(width, width // 64, layers, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    own: dict[str, Any] = {"mesh": {"dp": dist.get_world_size()}, "zero": 0, "compiler": "eager", "monitor": False}
    call = torch.compile(model, backend="hpml", options=own | options)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - length, (batch,))
        rows = torch.stack([text[start:start + length + 1] for start in starts.tolist()])
        loss = call(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        with sent if step >= steps - COUNTED else nullcontext():
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with sent if step >= steps - COUNTED else nullcontext():
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, sent.sent


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses and bytes with less sent for gradients.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first: list[float] = []
    for name, options in CASES.items():
        losses, sent = train(options, args.steps, args.width, args.layers)
        if dist.get_rank() == 0:
            shown = "  ".join(f"{losses[k]:.4f}" for k in (0, args.steps // 4 - 1, args.steps // 2 - 1, args.steps - 1))
            first = first or losses
            apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
            by_kind = {kind: size // COUNTED for kind, size in sent.items()}
            print(f"{name:12} {sum(sent.values()) // COUNTED:>12,} bytes  {shown}  last ten {sum(losses[-10:]) / 10:.4f}  "
                  f"apart {apart:.2g}  {by_kind}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
