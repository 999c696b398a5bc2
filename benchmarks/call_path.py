"""The path of one call through the code: functions, modules and folders entered, and folders returned to.

    python benchmarks/call_path.py [--json FILE]
    PYTHONPATH=/path/of/another/checkout python benchmarks/call_path.py

A small model is compiled and trained for a step on one rank, on two ranks, in two pipeline stages and under a memory budget,
and planned for 2 devices. Functions of rank 0 are listed in the order of their first call: a folder is returned to when the
next one is in a folder that others have come after. Fewer is easier to read.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

PACKAGES = ("hpml_compiler", "passes")
COMMON = {"compiler": "eager", "costs": "roofline"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, microbatches": (1, {"microbatches": 2}), "1 rank, budget": (1, {"memory_budget": "1GiB"}),
    "2 ranks": (2, {"mesh": {"tp": 2}}), "2 ranks, pipeline": (2, {"mesh": {"pp": 2}, "microbatches": 2}),
    "2 ranks, budget": (2, {"mesh": {"dp": 2}, "memory_budget": "1GiB"}), "hpml plan": (0, {"mesh": {"tp": 2}})}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def followed(call: Callable[[], Any]) -> dict[str, int]:
    functions: set[tuple[str, str]] = set()
    folders: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        package = next((name for name in PACKAGES if f"/{name}/" in file), None)
        if package is None or "/site-packages/" in file:
            return
        path = f"{package}/{file.rpartition(f'/{package}/')[2]}"
        if (path, frame.f_code.co_qualname) in functions:
            return
        functions.add((path, frame.f_code.co_qualname))
        folder = os.path.dirname(path)
        if not folders or folders[-1] != folder:
            folders.append(folder)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {"functions": len(functions), "modules": len({path for path, _ in functions}), "folders": len(set(folders)),
            "returns": len(folders) - len(set(folders))}


def on_rank(rank: int, world: int, options: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["HPML_CACHE"] = "0"
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    import hpml_compiler
    torch.manual_seed(0)
    model, x = Model(), torch.ones(8, 32)
    if world:
        compiled = torch.compile(model, backend="hpml", options={**COMMON, **options})
        found = followed(lambda: compiled(x).backward())
    else:
        found = followed(lambda: hpml_compiler.plan(model, x, cluster="1x2:a100-80g", **COMMON, **options))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked, found = parser.parse_args(), {}
    for name, (world, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (world, options, folder), nprocs=max(world, 1))
            found[name] = json.loads(Path(folder, "found.json").read_text())
        print(f"{name:24}", "  ".join(f"{what} {count}" for what, count in found[name].items()), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
