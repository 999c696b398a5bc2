"""Time that copies for recovery in process add to a step: of what changes, and of sharded state to another rank (`redundancy`).

    torchrun --nproc-per-node 2 benchmarks/step_copies.py [--width 512] [--layers 24] [--rows 256] [--turns 20] [--json FILE]

Steps of three kinds take turns, `--each` at a time: without copies, with copies of what changes outside of an optimizer's step
(all ranks of `hpml run --elastic` make them), and with those and copies of the shards. Medians over all turns, and medians of
the ratios of neighbors.
"""
from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpml_compiler
from hpml_compiler.elastic.kept_state import KeptState
from hpml_compiler.elastic.state_copies import StateCopies
from hpml_compiler.runtime.process.world_group import this_rank, world_size

KINDS = ("none", "changing", "shards")


class Steps:
    def __init__(self, width: int, layers: int, rows: int, compiler: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                                   nn.Linear(4 * width, width)) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.call: Any = torch.compile(self.model, backend="hpml", options={"zero": 3, "compiler": compiler})
        self.x, self.folder = torch.randn(rows, width), tempfile.TemporaryDirectory()
        self.step()
        self.run = hpml_compiler.Checkpointer(self.folder.name, self.model, self.optimizer).run_state
        self.copies = StateCopies(0, 1, world_size())
        self.kept = KeptState(self.run, 0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.call(self.x).square().mean().backward()
        self.optimizer.step()

    def seconds(self, kind: str) -> tuple[float, float]:
        """Time of a step with its copies, and of the copies alone, as far as the step waits for them."""
        begun = time.perf_counter()
        self.step()
        done = time.perf_counter()
        if kind != "none":
            self.kept.close()
            self.kept = KeptState(self.run, 0)
        if kind == "shards":
            self.copies.copy(self.kept)
        return time.perf_counter() - begun, time.perf_counter() - done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 24), ("rows", 256), ("turns", 20), ("each", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compiler", default="inductor", help='or "eager", which starts sooner')
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    steps = Steps(chosen.width, chosen.layers, chosen.rows, chosen.compiler)
    for kind in KINDS:
        steps.seconds(kind)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(chosen.turns):
        for kind in KINDS:
            times = [steps.seconds(kind) for _ in range(chosen.each)]
            found[kind].append((statistics.median(each[0] for each in times), statistics.median(each[1] for each in times)))
    result = {"parameters": sum(each.numel() for each in steps.model.parameters()),
              "tensors": 3 * len(list(steps.model.parameters())), "ranks": world_size(),
              **{kind: {"step_ms": 1e3 * statistics.median(each[0] for each in times),
                        "waits_ms": 1e3 * statistics.median(each[1] for each in times),
                        "ratio": statistics.median(a[0] / b[0] for a, b in zip(times, found["none"], strict=True))}
                 for kind, times in found.items()}}
    if this_rank() == 0:
        print(json.dumps(result, indent=1))
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
