"""Time to the first step on two ranks: hpml against DDP, FSDP2 and hand-written tensor parallel, cold and warm.

    python benchmarks/first_step.py [--rounds 3] [--models gpt mlp_wide] [--depth 4 16] [--warm] [--contenders fsdp hpml ...]

Every measurement is a launch of its own with empty caches, of compiled code as of plans, contenders interleaved; with --warm, a
second launch follows that finds what the first one left. --depth: gpt with so many layers. The time runs from the call of
`torch.compile` to the end of the first training step, on the slowest rank; starting Python and importing torch is the same for
all and not in it. Modules of hpml are there as bytecode, as pip leaves them.
"""
from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import build, median, report, seconds
from two_ranks import contenders, slowest

PEERS = ("ddp", "fsdp", "tensor_parallel")
CONTENDERS = (*PEERS, "hpml", "hpml_whole_batch", "hpml_blocks", "hpml_tp", "hpml_pp")


def measure(model_name: str, contender: str) -> None:
    """In a rank: time the first step and let rank 0 print it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, batch = build(model_name)
    make = contenders()[contender]
    dist.barrier()
    took = slowest(seconds(lambda: make(model, batch)()))
    if dist.get_rank() == 0:
        report({"first_step_s": took})
    dist.destroy_process_group()


def launches(model_name: str, contender: str, ranks: int, warm: bool) -> list[float]:
    """Seconds of the first launch, and of one after it."""
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "OMP_NUM_THREADS": "1",
                       "HPML_CACHE_DIR": caches, "HPML_CACHE": "1"}  # which other benchmarks leave out
        return [_launch(model_name, contender, ranks, environment) for _ in range(1 + warm)]


def _launch(model_name: str, contender: str, ranks: int, environment: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__,
         "--models", model_name, "--measure", contender],
        env=environment, capture_output=True, text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{contender} on {model_name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["first_step_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["gpt", "mlp_wide"])
    parser.add_argument("--depth", nargs="+", type=int, help="layers of gpt, in place of --models")
    parser.add_argument("--warm", action="store_true", help="a second launch with the same caches, too")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--measure", choices=CONTENDERS, help="only this one, here, under torchrun")
    args = parser.parse_args()
    if args.measure:
        measure(args.models[0], args.measure)
        return
    for package in ("hpml_compiler", "passes"):
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)
    for name in [f"gpt@{layers}" for layers in args.depth] if args.depth else args.models:
        times: dict[str, list[list[float]]] = {c: [] for c in args.contenders}
        for _ in range(args.rounds):
            for contender, found in times.items():
                found.append(launches(name, contender, args.ranks, args.warm))
        for k, caches in enumerate(("cold", "warm")[:1 + args.warm]):
            medians = {c: median([each[k] for each in found]) for c, found in times.items()}
            best = min(set(PEERS) & set(medians), key=medians.__getitem__, default=None)
            report({
                "benchmark": "first_step", "world": args.ranks, "model": name, "caches": caches, "rounds": args.rounds,
                "first_step_s": medians, "best_peer": best,
                "ratio_to_best_peer": medians["hpml"] / medians[best] if best and "hpml" in medians else None,
            })


if __name__ == "__main__":
    main()
