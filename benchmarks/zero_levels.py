"""Levels of ZeRO: a rank's bytes between steps and at the peak, and collectives, against the formulas.

    torchrun --nproc-per-node 2 benchmarks/zero_levels.py [--models gpt] [--levels 0 2 3] [--accumulate 1 4] [--json FILE]

Of n bytes of parameters on k ranks, with AdamW: 4n at level 0; n + 4n/k at level 2; 4n/k, and what is gathered of two blocks,
at level 3. To these comes what one device takes above its parameters, gradients and states for the rows of one rank, when it
calls the model twice in a step. A line of JSON for each: bytes of the fullest rank as multiples of n, and calls of
collectives.
"""
from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import MODELS, build, report
from memory import Training, peak_of, training
from torch import nn

import hpml_compiler

COLLECTIVES = "_c10d_functional::"


class Accumulating(Training):
    """Whose step calls the model several times."""

    calls = 1

    def step(self, call: Callable[..., Any]) -> float:
        for _ in range(self.calls - 1):
            call(*self.batch).backward()
        return super().step(call)


def trained(name: str, calls: int, rows: bool) -> Accumulating:
    """rows: with as many rows as a rank has, as a batch of its own, the same on all; else as they are dealt out."""
    model, batch = build(name)
    n = dist.get_world_size()
    batch = tuple(t.chunk(n)[0] for t in batch) if rows else next(iter(hpml_compiler.distribute([batch])))
    made = training(model, batch)
    found = Accumulating(made.model, made.optimizer, made.batch)
    found.calls = calls
    return found


def bytes_of(step: Accumulating, call: Callable[..., Any]) -> tuple[int, int]:
    """Between steps, and at the peak of one after the second."""
    for _ in range(2):
        step.step(call)
    between = step.state_bytes()
    return between, between + peak_of(lambda: step.step(call))


def collectives(step: Accumulating, call: Callable[..., Any]) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step.step(call)
    found: Counter[str] = Counter()
    for event in profile.key_averages():
        if event.key.startswith(COLLECTIVES) and "wait" not in event.key and not event.key.endswith("_out"):  # inside of others
            found[event.key.removeprefix(COLLECTIVES)] += event.count
    return dict(found)


def largest_blocks(model: nn.Module) -> int:
    """Bytes of the two largest parts that are gathered together: blocks, and modules outside of them."""
    parts = [*model.layers, *(each for name, each in model.named_children() if name != "layers")]  # pyright: ignore[reportGeneralTypeIssues]
    return sum(sorted(sum(p.nbytes for p in part.parameters()) for part in parts)[-2:])


def fullest(*nbytes: int) -> list[int]:
    most = torch.tensor(nbytes)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def measure(name: str, level: int, calls: int, compiler: str) -> dict[str, Any]:
    k = dist.get_world_size()
    alone = trained(name, 2, rows=True)  # in the second call gradients are there while values are saved
    n, blocks = sum(p.nbytes for p in alone.model.parameters()), largest_blocks(alone.model)
    torch._dynamo.reset()
    backend = "inductor" if compiler == "inductor" else "aot_eager"
    _, peak = fullest(*bytes_of(alone, torch.compile(alone.model, backend=backend)))
    activations = max(peak - 4 * n, 0)
    hpml_compiler.reset()
    ours = trained(name, calls, rows=False)
    options = {"compiler": compiler, "mesh": {"dp": k}, "zero": level, "monitor": False}
    call = torch.compile(ours.model, backend="hpml", options=options)
    between, peak = fullest(*bytes_of(ours, call))
    states = {0: 3 * n, 2: 3 * n / k, 3: 3 * n / k}[level]
    formula = {0: 4 * n, 2: n + 4 * n / k, 3: 4 * n / k + blocks}[level] + activations
    return {
        "benchmark": "zero_levels", "model": name, "world": k, "compiler": compiler, "zero": level, "accumulate": calls,
        "n_bytes": n, "activations": activations / n, "between": between / n, "between_formula": states / n,
        "peak": peak / n, "peak_formula": formula / n, "peak_to_formula": peak / formula,
        "collectives": collectives(ours, call)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt"], choices=MODELS)
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 2, 3])
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 4], help="calls of the model in a step")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--json", type=Path, help="add the lines to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for name in args.models:
        for calls in args.accumulate:
            for level in args.levels:
                found = measure(name, level, calls, args.compiler)
                if dist.get_rank() == 0:
                    report(found)
                    if args.json:
                        with args.json.open("a") as file:
                            print(json.dumps(found), file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
