"""Objectives of a set of plans, to compare before and after a change of the planner that should change none.

    python benchmarks/golden_plans.py MODELS.py --json before.json          # on one commit
    python benchmarks/golden_plans.py MODELS.py --against before.json       # on another

MODELS.py: `build(name)` gives a model and its batch, for each name of `MODELS`. `--big FILE:FUNCTION` adds a model of
benchmarks/planning.py's kind on 8x8:h100-80g. Every plan is solved to the end (gap 0), so that its objective is the
optimum's and does not depend on the order in which a solver meets the choices.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hpml_compiler
from hpml_compiler.options import Options

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 cpu": ("1x4:cpu", {}),
    "8 a100": ("2x4:a100-80g", {}),
    "64 h100": ("8x8:h100-80g", {}),
    "8 h100 dp tp": ("2x4:h100-80g", {"mesh": {"dp": 2, "tp": 4}}),
    "16 a100 free pin": ("2x8:a100-80g", {"mesh": {"x": 2, "y": 8}}),
    "4 cpu tp": ("4x1:cpu", {"mesh": {"tp": 4}}),
    "8 h100 budget": ("1x8:h100-80g", {"memory_budget": 0.6}),
    "8 a100 energy": ("2x4:a100-80g", {"objective": "energy", "mesh": {"x": 2, "y": 4}}),
}
"""Name -> cluster and options. A memory_budget here is a fraction of what the same plan holds without one."""


def load(path: Path) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(plan: Any) -> dict[str, Any]:
    """What has to stay."""
    return {
        "mesh": dict(plan.mesh),
        "objective_us": [graph.solver.cost for graph in plan.graphs],
        "status": [graph.solver.status for graph in plan.graphs],
        "step_us": plan.predicted.step_time_us,
        "memory": plan.memory.model_dump(),
    }


def one(model: torch.nn.Module, batch: Any, cluster: str, options: dict[str, Any]) -> dict[str, Any]:
    options = {"gap": 0.0, "time_limit": 120.0, "costs": "roofline", **options}
    budget = options.pop("memory_budget") if isinstance(options.get("memory_budget"), float) else None
    try:
        found = hpml_compiler.plan(model, batch, cluster, **options)
        if budget is not None:
            memory = found.memory
            held = memory.parameters + memory.gradients + memory.optimizer + memory.activations
            found = hpml_compiler.plan(model, batch, cluster, memory_budget=int(budget * held), **options)
    except Exception as error:  # a refusal is an outcome, too
        return {"refused": f"{type(error).__name__}: {getattr(error, 'what', error)}"}
    return outcome(found)


def plans(models: Path, names: list[str], cases: list[str], big: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    module = load(models)
    for name in names or list(module.MODELS):
        for case in cases or list(CASES):
            torch.manual_seed(0)
            yield f"{name}, {case}", one(*module.build(name), *CASES[case])
    if big is not None:
        path, function = big.split(":")
        model, batch = getattr(load(Path(path)), function)()
        for label, options in (("", {}), (" 24 GiB", {"memory_budget": "24GiB"})):
            options = {"gap": Options().gap, **options}
            yield f"{function}, 64 h100{label}", one(model, batch, "8x8:h100-80g", options)


def difference(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Largest relative difference of an objective; inf where one is refused and the other not."""
    if "refused" in before or "refused" in after:
        return 0.0 if before.get("refused") == after.get("refused") else float("inf")
    pairs = zip(before["objective_us"], after["objective_us"], strict=True)
    return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--cases", nargs="*", default=[], choices=list(CASES))
    parser.add_argument("--big")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    known = json.loads(args.against.read_text()) if args.against else {}
    found, worst = {}, 0.0
    for name, result in plans(args.file, args.models, args.cases, args.big):
        found[name] = result
        off = difference(known[name], result) if name in known else None
        worst = max(worst, off or 0.0)
        shown = result.get("refused") or f"{result['mesh']} {sum(result['objective_us']):.6g} {','.join(result['status'])}"
        print(f"{name:32} {shown}" + ("" if off is None else f"   off by {off:.1e}"), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    if known:
        print(f"largest difference {worst:.1e} over {len(set(found) & set(known))} plans")
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
