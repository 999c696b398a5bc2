"""Throughput of two ranks, one of which is half as fast, with and without `balance`, on CPUs over gloo.

    torchrun --nproc-per-node 2 benchmarks/balanced_rows.py [--axis dp|pp] [--steps 120] [--rows 48] [--ms 1.0]

An operator of the model takes a time per row, which is twice as long on the slow rank: it sleeps, so that the figures do not
depend on what else the machine does. Along dp, the optimum is that of a linear program: rows in proportion to the speeds. Along
pp, all cuts of the blocks are run, and the best of them is the optimum. Prints rows per second of the last third of the steps
(the median step), the shares of each rank, and the greatest difference of the losses.
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(work(x))))


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.blocks(x) - x.sin()).square().mean()


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


def measured(args: argparse.Namespace, **options: Any) -> tuple[float, list[float], list[Any]]:
    """Rows per second, losses, and shares of the ranks in each graph."""
    hpml_compiler.reset()
    model = Net(args.blocks if args.axis == "pp" else 1)
    options = {"mesh": {args.axis: dist.get_world_size()}, "zero": 0, "compiler": "eager", "monitor": False, **options}
    losses, seconds = train(torch.compile(model, backend="hpml", options=options), model, args.steps, args.rows)
    graphs = hpml_compiler.last_plan().graphs
    shares = [[len(stage.blocks) for stage in graph.pipeline.stages] if graph.pipeline else dict(graph.rows_by_rank)
              for graph in graphs]
    return args.rows / median(seconds[-args.steps // 3:]), losses, shares


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with a slow rank.")
    parser.add_argument("--axis", choices=("dp", "pp"), default="dp")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=6, help="of the model, along pp")
    parser.add_argument("--microbatches", type=int, default=4, help="along pp")
    parser.add_argument("--ms", type=float, default=1.0, help="time per row of the fast rank")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    register()
    slow = dist.get_rank() == (0 if args.axis == "pp" else 1)
    seconds_per_row[0] = args.ms / 1e3 * (1 + slow)
    stages: dict[str, Any] = {"microbatches": args.microbatches} if args.axis == "pp" else {}
    found = {f"balance {balance}": measured(args, balance=balance, **stages) for balance in ("off", "auto")}
    optimum = sum(1e3 / args.ms / (1 + rank) for rank in range(dist.get_world_size()))
    if args.axis == "pp":
        args.steps //= 4
        found |= {f"cut {k}+{args.blocks - k}": measured(args, stage_speeds=[k, args.blocks - k], **stages)
                  for k in range(1, args.blocks)}
        optimum = max(rate for name, (rate, _, _) in found.items() if name.startswith("cut"))
    first = found["balance off"][1]
    for name, (rate, losses, shares) in found.items() if dist.get_rank() == 0 else ():
        apart = max(abs(a - b) for a, b in zip(losses, first))
        print(f"{name:13} {rate:8.1f} rows/s, {rate / optimum:.2f} of the optimum of {optimum:.1f}  "
              f"shares {shares}  losses apart {apart:.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
