"""Benchmark collectives, called as in rewritten graphs, on the process groups of all mesh axes."""
from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.profile.timing import slowest_us, time_us
from hpml_compiler.runtime.process.compute_device import device_type, sends_through_host
from hpml_compiler.runtime.process.world_group import ensure_process_group
from passes.cost_model.base import COLLECTIVE_KINDS
from passes.cost_model.measured.measured_collectives import KIND, CollectivePoint, MeasuredGroup
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement, device_key
from passes.errors import BadInput

SIZES = tuple(4**k for k in range(5, 14))
"""Bytes: 1 KiB to 64 MiB in powers of 4."""

_ITEM_BYTES = 4  # float32
_MOST_CALL_US = 3e5  # sizes beyond the first one that takes longer are skipped
_WARM_CALLS = 3
_FEWEST_CALLS, _MOST_CALLS = 7, 100


@dataclass(frozen=True)
class CollectiveTiming:
    """Timing of one collective kind, group and size. samples_us: one per call, of the slowest rank."""

    kind: str
    group: MeasuredGroup
    nbytes: int
    samples_us: tuple[float, ...]

    @property
    def point(self) -> CollectivePoint:
        return CollectivePoint(self.kind, self.group, self.nbytes, statistics.median(self.samples_us))

    @property
    def measurement(self) -> TimedMeasurement:
        """The cache entry. extra includes the lower quartile, which is less sensitive to other programs."""
        tenths = statistics.quantiles(self.samples_us, n=20, method="inclusive")
        return TimedMeasurement(self.point.us, len(self.samples_us), tenths[17] / tenths[1],
                                {**self.point.extra, "lower_quartile_us": tenths[4]})


def profile_collectives(cache: MeasurementCache, seconds: float = 3.0,
                        sizes: Sequence[int] = SIZES) -> list[CollectiveTiming]:
    """Time every kind of collective on every group (see `mesh_groups`); rank 0 stores the medians in the cache.

    seconds: approximate time of the calls of one kind on one group. sizes: see `time_collective`. All ranks must call it,
    and get the same result. Creates the process group under torchrun; raises BadInput with fewer than two ranks.
    """
    if ensure_process_group() < 2:
        raise BadInput(
            "timing collectives needs a process group of at least two ranks",
            "hpml profile --collectives",
            "start it on several ranks: torchrun --nproc-per-node 2 -m hpml_compiler.cli profile --collectives",
        )
    timings: list[CollectiveTiming] = []
    for size, stride in mesh_groups(dist.get_world_size()):
        with _process_group(size, stride) as (group, ranks):
            for kind in COLLECTIVE_KINDS:
                timings += time_collective(kind, group, ranks, measured_group(size, stride), sizes=sizes,
                                           seconds=seconds)
    if dist.get_rank() == 0:
        measured = {timing.point.key: timing.measurement for timing in timings}
        cache.put_all(device_key(device_type()), KIND, measured)
    return timings


def mesh_groups(world_size: int) -> list[tuple[int, int]]:
    """(size, stride) of the groups of every axis that a mesh over the world can have, in order of stride."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return [(size, stride) for stride in divisors for size in divisors[1:] if world_size % (size * stride) == 0]


def measured_group(size: int, stride: int) -> MeasuredGroup:
    """Description, as stored in the cache, of the current world's groups of `size` ranks with this stride."""
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    config = dist.get_backend_config()  # "gloo", or "cpu:gloo,cuda:nccl"
    backends = dict(part.split(":") for part in config.split(",")) if ":" in config else {}
    return MeasuredGroup(size, stride, world, per_node, backends.get(device_type(), config))


def time_collective(kind: str, group: dist.ProcessGroup, ranks: Sequence[int], measured: MeasuredGroup, *,
                    sizes: Sequence[int] = SIZES, seconds: float = 3.0, seed: int = 0) -> list[CollectiveTiming]:
    """Time one kind of collective on this rank's group while the world's other groups do the same.

    All ranks must call it, and get the same result.
    ranks: of the group, in its order. sizes: bytes as `CostModel.collective_us` defines them, ascending; rounded up to whole
    float32 rows of each rank. seconds: divided evenly among the sizes, so that short calls, which are noisier, are repeated
    more often. Sizes are interleaved in a random order per round, each call after a barrier of the world; sizes beyond the
    first that takes over 0.3 s are skipped.
    """
    n, device = len(ranks), torch.device(device_type())
    lengths = sorted({-(-nbytes // (_ITEM_BYTES * n)) * n for nbytes in sizes})
    buffer = torch.ones(lengths[-1], dtype=torch.float32, device=device)
    calls: dict[int, Callable[[], Any]] = {}
    counts: dict[int, int] = {}
    for length in lengths:
        calls[length] = _call(kind, buffer[:length], group, ranks)
        (warm_us,) = slowest_us([min(_time_us(calls[length]) for _ in range(_WARM_CALLS))])
        counts[length] = min(max(int(seconds * 1e6 / len(lengths) / warm_us), _FEWEST_CALLS), _MOST_CALLS)
        if warm_us > _MOST_CALL_US:
            break
    samples: dict[int, list[float]] = {length: [] for length in calls}
    for turn in _turns(counts, random.Random(seed)):
        for length in turn:
            samples[length].append(_time_us(calls[length]))
    # A round trip is two messages.
    share = 0.5 if kind == "send_recv" else 1.0
    return [
        CollectiveTiming(kind, measured, length * _ITEM_BYTES, tuple(us * share for us in slowest_us(samples[length])))
        for length in calls
    ]


def _turns(counts: dict[int, int], shuffle: random.Random) -> Iterator[list[int]]:
    """Rounds in which each length occurs `counts` times in total, evenly spread; deterministic for a seed."""
    rounds = max(counts.values())
    for r in range(rounds):
        turn = [length for length, count in counts.items() if (r + 1) * count // rounds > r * count // rounds]
        shuffle.shuffle(turn)
        yield turn


def _call(kind: str, x: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Callable[[], Any]:
    """One collective call; the bytes of `x` are its `nbytes` in `CostModel.collective_us`."""
    c10d, n, name = torch.ops._c10d_functional, len(ranks), group.group_name
    part, rows, ones = x[: len(x) // n], x.view(n, -1), [1] * n
    if kind == "send_recv":
        return _there_and_back(x, group, ranks)
    launch = {
        "all_gather": lambda: c10d.all_gather_into_tensor(part, n, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(rows, "sum", n, name),
        "all_reduce": lambda: c10d.all_reduce(x, "sum", name),
        "all_to_all": lambda: c10d.all_to_all_single(rows, ones, ones, name),
        "broadcast": lambda: c10d.broadcast(x, 0, name),
    }[kind]
    return lambda: c10d.wait_tensor(launch())


def _there_and_back(x: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Callable[[], Any]:
    """Send a message to the neighbor on the axis and receive one back; with an odd number of ranks the last one is idle."""
    mine = list(ranks).index(dist.get_rank())
    if mine ^ 1 >= len(ranks):
        return lambda: None
    wire = "cpu" if sends_through_host(x.device, group) else x.device
    peer, buffer = ranks[mine ^ 1], torch.empty_like(x, device=wire)

    def receive() -> None:
        dist.recv(buffer, peer, group)
        buffer.to(x.device)

    def call() -> None:
        if mine % 2 == 0:
            dist.send(x.to(wire), peer, group)
            receive()
        else:
            receive()
            dist.send(x.to(wire), peer, group)

    return call


def _time_us(call: Callable[[], Any]) -> float:
    dist.barrier()
    return time_us(call)


@contextmanager
def _process_group(size: int, stride: int) -> Iterator[tuple[dist.ProcessGroup, list[int]]]:
    """This rank's group of `size` ranks with this stride, and its ranks; created and destroyed by all ranks together."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if size == world:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD, list(range(world))
        return
    starts = [r for r in range(world) if r // stride % size == 0]
    groups = [[start + k * stride for k in range(size)] for start in starts]
    mine: Any = dist.new_subgroups_by_enumeration(groups)[0]
    try:
        yield mine, next(ranks for ranks in groups if rank in ranks)
    finally:
        dist.destroy_process_group(mine)
