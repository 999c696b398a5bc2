"""Several ranks: hpml against DDP, FSDP2 and hand-written tensor parallel, each compiled with inductor.

    torchrun --nproc-per-node 2 benchmarks/two_ranks.py [--rounds 10] [--models gpt mlp_wide]

Every peer trains its own copy of one model on the global batch, one thread per rank. In every round each takes its turn
of a few steps, of which the first is not counted: it pays for caches that the contender before has filled, as no
training does. DDP and FSDP2 get their rank's rows; hpml gets them through `hpml_compiler.distribute`, tensor parallel
the whole batch. Reports the median step of the slowest rank, with hpml's pinned meshes besides what it chooses by
itself. `first_step.py` has the time to the first step.
"""
from __future__ import annotations

import argparse
import os
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
from hpml_compiler.compile import session


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
        session.reset()
        if distributed:
            batch = next(iter(hpml_compiler.distribute([batch])))
        return stepper(torch.compile(model, backend="hpml", options=options), model.parameters(), batch)

    return make


def contenders() -> dict[str, Callable[[nn.Module, tuple], Callable[[], float]]]:
    n = dist.get_world_size()
    return {
        "ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel, "hpml": hpml({}, True),
        "hpml_whole_batch": hpml({}, False), "hpml_dp": hpml({"mesh": {"dp": n}}, True),
        "hpml_tp": hpml({"mesh": {"tp": n}}, False),
    }


def slowest(value: float) -> float:
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def timed(step: Callable[[], float]) -> float:
    dist.barrier()
    return slowest(seconds(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in args.models:
        steps: dict[str, Callable[[], float]] = {}
        for contender, make in contenders().items():
            steps[contender] = make(*build(name))
            steps[contender]()
        times: dict[str, list[float]] = {c: [] for c in steps}
        for k in range(args.rounds):
            order = list(steps) if k % 2 else list(steps)[::-1]
            for contender in order:
                times[contender] += turn(lambda step=steps[contender]: timed(step))
        medians = {c: median(t) for c, t in times.items()}
        peers = ("ddp", "fsdp", "tensor_parallel")
        best = min(peers, key=medians.__getitem__)
        if dist.get_rank() == 0:
            report({
                "benchmark": "ranks", "world": dist.get_world_size(), "model": name, "rounds": args.rounds,
                "threads": int(os.environ.get("OMP_NUM_THREADS", "1")), "median_step_s": medians, "best_peer": best,
                "ratio_to_best_peer": median([a / b for a, b in zip(times["hpml"], times[best])]),
                "ratio_to_best_pinned": medians["hpml"] / min(medians["hpml_dp"], medians["hpml_tp"]),
            })
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
