"""Time calls in interleaved rounds, so that temporary load on the machine affects all of them alike."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.runtime.process.compute_device import device_type
from passes.cost_model.measured.measurement_cache import TimedMeasurement

FEWEST_ROUNDS, MOST_ROUNDS = 5, 200


def synchronize() -> None:
    if device_type() == "cuda":
        torch.cuda.synchronize()


def time_us(call: Callable[[], Any], repeats: int = 1) -> float:
    """Mean time in µs of one of `repeats` calls."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


def slowest_us(values: Sequence[float]) -> list[float]:
    """Elementwise maximum over all ranks; the values themselves without a process group."""
    if not dist.is_initialized():
        return list(values)
    times = torch.tensor(values, dtype=torch.float64, device=device_type())
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


@dataclass(frozen=True)
class TimedCall:
    """A call, and how it is timed in each round: `warm` untimed calls, then `samples` of `repeats` calls each. rounds: the
    most rounds that include it; the same on all ranks."""

    call: Callable[[], Any]
    repeats: int = 1
    samples: int = 1
    warm: int = 0
    rounds: int = MOST_ROUNDS


def in_rounds(calls: Mapping[str, TimedCall], seconds: float) -> dict[str, list[float]]:
    """Time all calls in rounds for about `seconds`; returns samples in µs by name.

    In a process group all ranks make the same call at the same time after a barrier, and the slowest rank's time counts; a
    call that some rank does not have is left out.
    """
    names = _on_all_ranks(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}

    def one_round(number: int) -> None:
        for name in names:
            timed = calls[name]
            if number >= timed.rounds:
                continue
            if dist.is_initialized():
                dist.barrier()
            for _ in range(timed.warm):
                timed.call()
            samples[name] += [time_us(timed.call, timed.repeats) for _ in range(timed.samples)]

    (first_us,) = slowest_us([time_us(lambda: one_round(0))])
    for number in range(1, min(max(int(seconds * 1e6 / first_us), FEWEST_ROUNDS), MOST_ROUNDS)):
        one_round(number)
    flat = slowest_us([us for name in names for us in samples[name]])
    for name in names:
        samples[name], flat = flat[: len(samples[name])], flat[len(samples[name]):]
    return samples


def _on_all_ranks(names: Iterable[str]) -> list[str]:
    if not dist.is_initialized():
        return list(names)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(names))
    return [name for name in gathered[0] if all(name in each for each in gathered)]


def as_measurement(us: Sequence[float]) -> TimedMeasurement:
    """Median, number and spread (90th over 10th percentile) of samples."""
    ordered = sorted(us)
    low, high = ordered[len(us) // 10], ordered[-1 - len(us) // 10]
    return TimedMeasurement(statistics.median(us), len(us), max(high / low, 1.0) if low else 1.0)
