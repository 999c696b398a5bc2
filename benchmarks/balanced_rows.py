"""Throughput of two ranks, one of which is half as fast, with and without `balance`, on CPUs over gloo.

    torchrun --nproc-per-node 2 benchmarks/balanced_rows.py [--steps 120] [--rows 48] [--ms 1.0]

An operator of the model takes a time per row, which is twice as long on rank 1: it sleeps, so that the figures do not depend on
what else the machine does. The optimum is that of a linear program: rows in proportion to the speeds. Prints rows per second of
the last third of the steps (the median step), the rows of each rank, and the greatest difference of the losses.
"""
from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from slow_operator import register, seconds_per_row, work
from torch import nn

import hpml_compiler

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(work(x)))) - x.sin()).square().mean()


def train(call: Any, model: nn.Module, steps: int, rows: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    optimizer, losses, seconds = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(steps):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with a slow rank.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--ms", type=float, default=1.0, help="time per row of rank 0")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    register()
    seconds_per_row[0] = args.ms / 1e3 * (1 + dist.get_rank())
    optimum = sum(1e3 / args.ms / (1 + rank) for rank in range(dist.get_world_size()))
    first: list[float] = []
    for balance in ("off", "auto"):
        hpml_compiler.reset()
        model = Net()
        options: dict[str, Any] = {"mesh": {"dp": dist.get_world_size()}, "zero": 0, "compiler": "eager", "monitor": False,
                                   "balance": balance}
        losses, seconds = train(torch.compile(model, backend="hpml", options=options), model, args.steps, args.rows)
        first = first or losses
        got = args.rows / median(seconds[-args.steps // 3:])
        if dist.get_rank() == 0:
            apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
            shares = [dict(graph.rows_by_rank) for graph in hpml_compiler.last_plan().graphs if graph.rows_by_rank]
            print(f"balance {balance:5} {got:8.1f} rows/s, {got / optimum:.2f} of the optimum of {optimum:.1f}  "
                  f"rows {shares or 'equal'}  losses apart {apart:.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
