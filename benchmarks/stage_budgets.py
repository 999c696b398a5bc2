"""Stages of ranks under memory budgets: gradients compared bit for bit, and peaks with what was predicted.

    python benchmarks/stage_budgets.py [--models gpt deep] [--schedules 1f1b zbv] [--settings none full 0.9 0.5]

Four ranks, pp 2 x tp 2, dropout 0.2, kernels of torch. A setting is the option `recompute`, or a budget as a share of the
largest peak before it; all have the placements of "auto", the first. A line for each: bytes of the fullest rank, these over the
budget, the predicted ones over them, the same by rank at its worst, and whether loss and gradients are equal to the last bit.
Each schedule is a launch of its own, in which `allocations.c` counts what torch's allocator gives out: torch's profiler misses
what gloo's threads free.
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import report
from memory import MIB
from models import Block
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.peak_memory import peak_of_stages
from hpml_compiler.runtime.optimizer.resident_memory import local
from passes.errors import HpmlError

RANKS, DROPOUT, STEPS = 4, 0.2, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}
SETTINGS = ("none", "selective", "full", "0.9", "0.7", "0.5")


class Layer(Block):
    """With attention written out, so that its masks are drawn by an operation of their own, and dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm1(x)
        q, k, v = (f(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = F.dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1), DROPOUT)
        x = x + F.dropout(self.o((scores @ v).transpose(1, 2).flatten(2)), DROPOUT)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), DROPOUT)


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4, vocab: int = 256, length: int = 64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)), DROPOUT)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Deep(nn.Module):
    """Layers whose activations are most of the memory."""

    def __init__(self, width: int = 64, layers: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width),
                                                  nn.Dropout(DROPOUT)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def made(model: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if model == "deep":
        return Deep(), (torch.randn(2048, 64),)
    return GPT(), (torch.randint(0, 256, (32, 64)), torch.randint(0, 256, (32, 64)))


class Counter:
    """The preloaded library."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        for each in (library.allocated_bytes, library.most_allocated_bytes):
            each.restype = ctypes.c_long
        self.library = library

    def most(self, step: Callable[[], object], held_bytes: int) -> int:
        """The least peak of some steps. held_bytes: in memory before and after each."""
        found = []
        for _ in range(STEPS):
            gc.collect()
            dist.barrier()
            time.sleep(0.05)  # gloo's threads let go of what they have
            before = self.library.allocated_bytes()
            self.library.reset_most_allocated()
            step()
            found.append(held_bytes + self.library.most_allocated_bytes() - before)
        return min(found)


def run(model: str, options: dict[str, Any], counter: Counter) -> tuple[list[torch.Tensor], list[int], Plan]:
    """Loss and gradients of the first step, the peak of later ones by rank, and the plan."""
    hpml_compiler.reset()
    module, batch = made(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    call = torch.compile(module, backend="hpml", options=options)
    torch.manual_seed(1)
    numbers: list[torch.Tensor] = []

    def step() -> None:
        loss = call(*batch)
        loss.backward()
        if not numbers:
            numbers.extend([loss.detach().clone(), *(local(p.grad).clone() for p in module.parameters())])
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [*module.parameters(), *(value for each in optimizer.state.values() for value in each.values())]
    held = sum(local(value).untyped_storage().nbytes() for value in state)
    return numbers, by_rank(counter.most(step, held)), hpml_compiler.last_plan()


def predicted(plan: Plan) -> list[int]:
    """Peaks by rank of the pipeline."""
    (graph,) = plan.graphs
    assert graph.pipeline is not None and plan.peak is not None
    state = {part: plan.peak.parts.get(part, 0) for part in ("parameters", "optimizer")}
    kept = [[stage.kept for stage in graph.pipeline.stages if stage.rank == rank and stage.kept is not None]
            for rank in range(graph.pipeline.ranks)]
    return [peak_of_stages(graph, each, state).bytes for each in kept]


def by_rank(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure(model: str, schedule: str, settings: list[str]) -> None:
    """In a rank: print a line for each setting."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    base: dict[str, Any] = {"compiler": "eager", "mesh": {"pp": 2, "tp": 2}, "microbatches": 4, "schedule": schedule,
                            "monitor": False}
    if SCHEDULES[schedule] > 1:
        base["virtual_stages"] = SCHEDULES[schedule]
    counter = Counter()
    expected, free, plan = run(model, base, counter)
    largest = max(free)
    for setting in ["auto", *settings]:
        found: dict[str, Any] = {"benchmark": "stage_budgets", "model": model, "schedule": schedule, "setting": setting}
        budget = round(float(setting) * largest) if setting[0].isdigit() else None
        try:
            numbers, peaks, made = (expected, free, plan) if setting == "auto" else run(
                model, base | {"plan": plan} | ({"memory_budget": budget} if budget else {"recompute": setting}), counter)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, HpmlError):
                raise
            found["refused"] = str(inner).splitlines()[0]
        else:
            counted, most = predicted(made), max(peaks)
            largest = max(largest, most)
            found |= {"mib": [each / MIB for each in peaks], "to_budget": most / budget if budget else None,
                      "predicted_to_measured": made.memory.peak / most,
                      "by_rank": [counted[rank // 2] / peak for rank, peak in enumerate(peaks)],
                      "equal": all(by_rank(all(torch.equal(a, b) for a, b in zip(numbers, expected, strict=True))))}
        if dist.get_rank() == 0:
            report(found)
    dist.destroy_process_group()


def row(found: dict[str, Any]) -> str:
    name = f"{found['model']:<5} {found['schedule']:<12} {found['setting']:<10}"
    if "refused" in found:
        return f"{name} refused: {found['refused']}"
    share = f"{found['to_budget']:.3f}" if found["to_budget"] else ""
    worst = max(found["by_rank"], key=lambda each: abs(each - 1.0))
    return f"{name} {max(found['mib']):8.2f} {share:>8} {found['predicted_to_measured']:>9.3f} {worst:>8.3f}  {found['equal']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deep", "gpt"], choices=["deep", "gpt"])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--measure", action="store_true", help="the first of these, here, under torchrun")
    args = parser.parse_args()
    if args.measure:
        measure(args.models[0], args.schedules[0], args.settings)
        return
    print("model schedule     setting         MiB / budget predicted  by rank  equal", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "allocations.so"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(Path(__file__).with_name("allocations.c")), "-o", library, "-ldl",
                        "-lpthread"], check=True)
        for model in args.models:
            for schedule in args.schedules:
                with subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__,
                     "--measure", "--models", model, "--schedules", schedule, "--settings", *args.settings],
                    env={**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
                ) as launch:
                    assert launch.stdout is not None
                    for line in launch.stdout:
                        if line.startswith("{"):
                            print(line, end="", flush=True)
                            print(row(json.loads(line)), file=sys.stderr, flush=True)
                if launch.returncode:
                    print(f"{model} {schedule}: the launch ended with {launch.returncode}", file=sys.stderr)


if __name__ == "__main__":
    main()
