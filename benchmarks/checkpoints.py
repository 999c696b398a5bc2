"""Stall of a training step by a checkpoint: written in the background against written before training goes on.

    torchrun --nproc-per-node 2 benchmarks/checkpoints.py [--width 1024] [--layers 6] [--rounds 7] [--folder DIR] [--json FILE]

In each round a checkpoint is saved both ways, in turns, with steps in between; medians over rounds. stall: time that the call
takes. During: median time of a step while a checkpoint is written, against a quiet one.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpml_compiler

WAYS = {"synchronous": False, "background": True}


def step_seconds(call: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    begun = time.perf_counter()
    optimizer.zero_grad()
    call(x).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(chosen.width, 4 * chosen.width), nn.GELU(),
                                          nn.Linear(4 * chosen.width, chosen.width)) for _ in range(chosen.layers)))
    call = torch.compile(model, backend="hpml", options={"mesh": {"tp": 2}} if "RANK" in os.environ else {})
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(chosen.rows, chosen.width)
    step_seconds(call, optimizer, x)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        shared = [made]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        checkpointer = hpml_compiler.Checkpointer(shared[0], model, optimizer, keep=2)
        found = measure(checkpointer, call, optimizer, x, chosen.rounds)
        checkpointer.close()
        if dist.is_initialized():
            dist.barrier()
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["ranks"] = dist.get_world_size() if dist.is_initialized() else 1
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(found, indent=1))


def measure(checkpointer: Any, call: Any, optimizer: Any, x: torch.Tensor, rounds: int) -> dict[str, Any]:
    stalls: dict[str, list[float]] = {way: [] for way in WAYS}
    during, quiet = [], []
    step = 0
    for number in range(rounds + 1):
        for way in list(WAYS)[::-1 if number % 2 else 1]:
            quiet += [step_seconds(call, optimizer, x) for _ in range(3)]
            step += 1
            begun = time.perf_counter()
            checkpointer.save(step, wait=not WAYS[way])
            stall = time.perf_counter() - begun
            if WAYS[way]:
                during += [step_seconds(call, optimizer, x) for _ in range(3)]
            checkpointer.wait()
            if number:  # the first makes the buffers
                stalls[way].append(stall)
    medians = {way: statistics.median(values) for way, values in stalls.items()}
    return {"stall_s": medians, "ratio": medians["background"] / medians["synchronous"],
            "ratios": [b / s for s, b in zip(*(stalls[way] for way in ("synchronous", "background")), strict=True)],
            "step_s": {"quiet": statistics.median(quiet), "during": statistics.median(during)}}


if __name__ == "__main__":
    main()
