"""Several ranks: hpml against DDP, FSDP2 and hand-written tensor parallel, each compiled with inductor.

    torchrun --nproc-per-node 2 benchmarks/two_ranks.py [--rounds 10] [--models gpt mlp_wide] [--contenders fsdp hpml_zero3 ...]
    torchrun --nproc-per-node 2 benchmarks/two_ranks.py --models gpt --pinned

Every peer trains its own copy of one model on the global batch, one thread per rank. In every round each takes its turn
of a few steps, of which the first is not counted: it pays for caches that the contender before has filled, as no
training does. DDP and FSDP2 get their rank's rows; hpml gets them through `hpml_compiler.distribute`, tensor parallel
the whole batch. Reports the median step of the slowest rank, with hpml's pinned meshes besides what it chooses by
itself, and ZeRO's level 3, which is what FSDP2 does. `first_step.py` has the time to the first step. `--pinned` compares hpml
with nothing pinned to itself with every mesh of pp, dp and tp, and with stages, with every schedule. `--clock cpu` counts
the seconds that all threads of a rank work, gloo's among them, which is what can be compared on a machine that others use.
"""
from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import MODELS, build, median, report, seconds, stepper, turn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpml_compiler
from hpml_compiler.session import session

SCHEDULES = ({"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "zero_bubble"},
             {"schedule": "interleaved", "virtual_stages": 2})
MICROBATCHES = (2, 4)
"""Multiples of the number of stages."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def rows(batch: tuple) -> tuple:
    n, r = dist.get_world_size(), dist.get_rank()
    return tuple(t.chunk(n)[r] for t in batch)


def ddp(model: nn.Module, batch: tuple) -> Callable[[], float]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return stepper(torch.compile(wrapped), model.parameters(), rows(batch))


def fsdp(model: nn.Module, batch: tuple) -> Callable[[], float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        if isinstance(layer, nn.ModuleDict):  # it is not called as a module: shard its parts
            for part in layer.values():
                fully_shard(part, mesh=mesh)
        else:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(torch.compile(model), model.parameters(), rows(batch))


def tensor_parallel(model: nn.Module, batch: tuple) -> Callable[[], float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        if isinstance(layer, nn.ModuleDict):
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            continue
        parallelize_module(layer, mesh, {
            "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel(),
            "up": ColwiseParallel(), "down": RowwiseParallel(),
        })
        layer.heads //= dist.get_world_size()
    return stepper(torch.compile(model), model.parameters(), batch)


def hpml(options: dict[str, Any], distributed: bool) -> Callable[[nn.Module, tuple], Callable[[], float]]:
    def make(model: nn.Module, batch: tuple) -> Callable[[], float]:
        session.reset(same_prices=True)
        if distributed:
            batch = next(iter(hpml_compiler.distribute([batch])))
        return stepper(torch.compile(model, backend="hpml", options=options), model.parameters(), batch)

    return make


def contenders() -> dict[str, Callable[[nn.Module, tuple], Callable[[], float]]]:
    n = dist.get_world_size()
    return {
        "ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel, "hpml": hpml({}, True),
        "hpml_whole_batch": hpml({}, False), "hpml_dp": hpml({"mesh": {"dp": n}}, True),
        "hpml_tp": hpml({"mesh": {"tp": n}}, False), "hpml_pp": hpml({"mesh": {"pp": n}}, False),
        "hpml_blocks": hpml({"compile_blocks": "on"}, True),
        "hpml_zero3": hpml({"mesh": {"dp": n}, "zero": 3}, True),
    }


def pinned() -> dict[str, Callable[[nn.Module, tuple], Callable[[], float]]]:
    """hpml with nothing pinned, and with everything pinned."""
    n = dist.get_world_size()
    found = {"hpml": hpml({}, True)}
    for pp, dp, tp in itertools.product(*[[size for size in range(1, n + 1) if n % size == 0]] * 3):
        mesh = {name: size for name, size in (("pp", pp), ("dp", dp), ("tp", tp)) if size > 1}
        if pp * dp * tp != n:
            continue
        for how, count in itertools.product(SCHEDULES, MICROBATCHES) if pp > 1 else [({}, 0)]:
            options = {"mesh": mesh, **how} | ({"microbatches": count * pp} if count else {})
            name = " ".join(str(each) for each in (*(f"{name}{size}" for name, size in mesh.items()), *how.values())) + (
                f" m{count * pp}" if count else "")
            found[name] = hpml(options, dp > 1)
    return found


def slowest(value: float) -> float:
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def timed(step: Callable[[], float], clock: Callable[[], float]) -> float:
    dist.barrier()
    return slowest(seconds(step, clock))


def ratios(times: dict[str, list[float]], medians: dict[str, float]) -> dict[str, Any]:
    """Of those that took part; of steps of the same turn, and their median."""
    found: dict[str, Any] = {}
    peers = [c for c in ("ddp", "fsdp", "tensor_parallel") if c in times]
    if "hpml" in times and peers:
        best = min(peers, key=medians.__getitem__)
        found = {"best_peer": best, "ratio_to_best_peer": median([a / b for a, b in zip(times["hpml"], times[best])])}
    if {"hpml", "hpml_dp", "hpml_tp"} <= times.keys():
        found["ratio_to_best_pinned"] = medians["hpml"] / min(medians["hpml_dp"], medians["hpml_tp"])
    if (others := [c for c in times if c in pinned()]) and "hpml" in others and len(others) > 1:
        best = min((c for c in others if c != "hpml"), key=medians.__getitem__)
        found |= {"best_pinned": best, "ratio_to_best_pinned": median([a / b for a, b in zip(times["hpml"], times[best])])}
    if {"hpml_zero3", "fsdp"} <= times.keys():
        found["ratio_zero3_to_fsdp"] = median([a / b for a, b in zip(times["hpml_zero3"], times["fsdp"])])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--contenders", nargs="+", help="these alone")
    parser.add_argument("--pinned", action="store_true", help="hpml alone, with nothing and with everything pinned")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in args.models:
        steps: dict[str, Callable[[], float]] = {}
        known = pinned() if args.pinned else contenders()
        session.reset()  # hpml's contenders are planned by one quick profile, of this model
        chosen = {c: make for c, make in known.items() if args.contenders is None or c in args.contenders}
        for contender, make in chosen.items():
            steps[contender] = make(*build(name))
            steps[contender]()
        times: dict[str, list[float]] = {c: [] for c in steps}
        for k in range(args.rounds):
            order = list(steps) if k % 2 else list(steps)[::-1]
            for contender in order:
                times[contender] += turn(lambda step=steps[contender]: timed(step, CLOCKS[args.clock]))
        medians = {c: median(t) for c, t in times.items()}
        if dist.get_rank() == 0:
            report({
                "benchmark": "ranks", "world": dist.get_world_size(), "model": name, "rounds": args.rounds,
                "threads": int(os.environ.get("OMP_NUM_THREADS", "1")), "clock": args.clock, "median_step_s": medians,
                **ratios(times, medians),
            })
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
