"""Distillation: a student learns from a frozen teacher whose weights are split over all devices.

    python examples/distillation.py                     # on one device
    hpml run --nproc 2 examples/distillation.py         # on two: the same losses

The teacher is compiled by itself and pinned to tensor parallelism, so that no device holds it whole. Its logits reach the loss
as each rank has them; nothing is gathered in between.
"""
from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="")
    parser.add_argument("--compiler", default="inductor")
    given = parser.parse_args()
    torch.manual_seed(0)
    teacher, student = network(256).requires_grad_(False).eval(), network(32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    options = {"compiler": given.compiler}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ask = torch.compile(teacher, backend="hpml", options={**options, "mesh": {"tp": ranks}} if ranks > 1 else options)
    learn = torch.compile(student, backend="hpml", options=options)
    for number in range(4):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            wanted = ask(rows)
        loss = F.kl_div(F.log_softmax(learn(rows) / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
