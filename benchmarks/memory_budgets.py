"""Byte budgets from unconstrained memory down to the smallest that works: predicted and measured bytes.

    python benchmarks/memory_budgets.py [--cases gpt_4 unet logits ...] [--shares 0.9 0.8 ...]
    torchrun --nproc-per-node 2 benchmarks/memory_budgets.py [--mesh dp=2]
    python benchmarks/memory_budgets.py --models MODELS.py --cases bert convnet      # build(name): model, batch by name

A case is a model of models.py or of MODELS.py; `+autocast` behind its name runs it in bfloat16. Prints a line of JSON for
each: at every budget the total of the fullest rank (parameters, optimizer state, and what the allocator gives out at most
besides during a step), what was predicted, and how far losses are from those without a budget.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import build, report
from memory import MIB, smallest_budget, training
from torch import nn

import hpml_compiler

CASES = ("gpt_4", "gpt_2", "logits", "gpt_4+autocast", "gpt_broken", "gpt_memory", "unet")
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TIME_LIMIT = 300.0
"""Seconds: a busy machine is to find what a quiet one does."""
STEPS = 2
"""Whose losses are compared, before bytes are counted."""


class LossOf(nn.Module):
    """Of a model that is called by name."""

    def __init__(self, model: nn.Module, batch: dict[str, Any]):
        super().__init__()
        self.model = model
        self.names = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
        self.rest = {name: value for name, value in batch.items() if name not in self.names}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, tensors)), **self.rest)["loss"]


def load(case: str, models: Path | None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if models is None:
        return build(case)
    spec = importlib.util.spec_from_file_location("models_given", models)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Dynamo looks for it by name
    spec.loader.exec_module(module)
    model, batch = module.build(case)
    return LossOf(model, batch), tuple(value for value in batch.values() if isinstance(value, torch.Tensor))


class Case:
    def __init__(self, name: str, models: Path | None, options: dict[str, Any]):
        self.name, _, how = name.partition("+")
        self.autocast, self.models, self.options = how == "autocast", models, options

    def run(self, budget: int | None) -> dict[str, Any]:
        """Two steps, and a third whose bytes are counted. Raises what hpml raises."""
        hpml_compiler.reset()
        trained = training(*load(self.name, self.models))
        options = self.options if budget is None else {**self.options, "memory_budget": budget}
        call = self._cast(torch.compile(trained.model, backend="hpml", options=options))
        losses = [trained.step(call) for _ in range(STEPS)]
        above = trained.peak_above_state(call)
        peak = None if budget is None else hpml_compiler.last_plan().peak
        return {"losses": losses, "total": fullest(trained.state_bytes() + above),
                "predicted": None if peak is None else peak.bytes}

    def _cast(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cast(*batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                return call(*batch)

        return cast

    def sweep(self, shares: list[float]) -> dict[str, Any]:
        """Down until a budget is refused, or not met; then at the least that works."""
        free = self.run(None)
        points: list[dict[str, Any]] = []
        least: int | None = None
        for share in shares:
            budget = round(share * free["total"])
            try:
                points.append(self._point(budget, free))
            except Exception as error:
                if (least := smallest_budget(error)) is None:
                    raise
                break
            if points[-1]["predicted"] is not None and points[-1]["predicted"] > budget:  # several ranks go on regardless
                least = points.pop()["predicted"]
                break
        if least is not None:
            points.append({**self._point(least, free), "least": True})
        return {"unbounded_mib": free["total"] / MIB, "points": points, "worst": worst(points)}

    def _point(self, budget: int, free: dict[str, Any]) -> dict[str, Any]:
        found = self.run(budget)
        print(f"{self.name}: budget {budget / MIB:.1f} MiB, total {found['total'] / MIB:.1f}, predicted "
              f"{(found['predicted'] or 0) / MIB:.1f}", file=sys.stderr, flush=True)
        return {
            "budget": budget, "total": found["total"], "predicted": found["predicted"],
            "losses_apart": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], free["losses"], strict=True)),
        }


def worst(points: list[dict[str, Any]]) -> dict[str, float]:
    counted = [point for point in points if point["predicted"]]
    return {
        "total_to_budget": max((point["total"] / point["budget"] for point in points), default=0.0),
        "predicted_off": max((abs(point["predicted"] / point["total"] - 1) for point in counted), default=0.0),
        "losses_apart": max((point["losses_apart"] for point in points), default=0.0),
    }


def fullest(nbytes: int) -> int:
    """Of the fullest rank."""
    if not dist.is_initialized():
        return nbytes
    most = torch.tensor(nbytes)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--models", type=Path, help="a file whose build(name) gives a model, and its batch by name")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of what a step takes without a budget")
    parser.add_argument("--mesh", default="", help="an axis to pin, as dp=2")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--json", type=Path, help="add the lines to this file, too")
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    axis, _, size = args.mesh.partition("=")
    options: dict[str, Any] = {"compiler": args.compiler, "time_limit": TIME_LIMIT}
    if axis:
        options["mesh"] = {axis: int(size)}
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name in args.cases:
        found = {"benchmark": "memory_budgets", "case": name, "world": world, "mesh": args.mesh,
                 **Case(name, args.models, options).sweep(args.shares)}
        if world == 1 or dist.get_rank() == 0:
            report(found)
            if args.json:
                with args.json.open("a") as file:
                    print(json.dumps(found), file=file)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
