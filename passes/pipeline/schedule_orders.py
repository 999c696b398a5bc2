"""Order of computations on each rank of a pipeline, by schedule.

    gpipe          all forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019)
    1f1b           p - 1 - d forwards, then forward and backward in turn (Narayanan et al., "PipeDream", SOSP 2019)
    interleaved    the same over chunks of p microbatches per virtual stage: 2 (p - 1 - d) + (v - 1) p forwards come first
                   (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
                   SC 2021, arXiv 2104.04473, section 2.2); m must be a multiple of p
    zero_bubble    interleaved, with backward split: gradients of inputs, which the previous stage waits for, and gradients of
                       weights, which fill the bubbles (ZB1P of Qi et al., "Zero bubble pipeline parallelism", ICLR
                       2024, arXiv 2401.10241)
        zbv            two stages a rank; the second ones run from the last rank back to the first (section 6 there)

Rank d of p has stage d, or, with virtual stages, the stages d, d + p, ...; under zbv d and 2 p - 1 - d. The first three are
short enough to be written here; torch's own 1F1B order omits the last rank's first microbatch.
The other two are torch's.
"""
from __future__ import annotations

from typing import Literal

from passes.errors import BadInput

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
ComputeKind = Literal["forward", "backward", "backward_input", "backward_weight"]
Computed = tuple[ComputeKind, int, int]
"""(kind, stage, microbatch)"""

_TORCH: dict[str, str] = {"zero_bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble"}
_KINDS: dict[str, ComputeKind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def stages_of(schedule: ScheduleName, rank: int, ranks: int, virtual: int) -> tuple[int, ...]:
    """The stages of a rank."""
    if schedule == "zbv":
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + k * ranks for k in range(virtual))


def rank_orders(schedule: ScheduleName, ranks: int, virtual: int, microbatches: int) -> list[list[Computed]]:
    """Computations of each rank, in order. Raises BadInput where the numbers do not fit."""
    _check(schedule, ranks, virtual, microbatches)
    if schedule in _TORCH:
        from passes.compat.execution.torch_pipelining import schedule_order

        found = schedule_order(_TORCH[schedule], ranks, virtual, microbatches)
        return [[(_KINDS[what], stage, microbatch) for what, stage, microbatch in own] for own in found]
    if schedule == "gpipe":
        return [_gpipe(rank, microbatches) for rank in range(ranks)]
    return [_one_forward_one_backward(rank, ranks, virtual, microbatches) for rank in range(ranks)]


def _gpipe(rank: int, microbatches: int) -> list[Computed]:
    forwards: list[Computed] = [("forward", rank, i) for i in range(microbatches)]
    return forwards + [("backward", rank, i) for i in range(microbatches)]


def _one_forward_one_backward(rank: int, ranks: int, virtual: int, microbatches: int) -> list[Computed]:
    count = microbatches * virtual
    forwards: list[Computed] = [("forward", *_nth(k, rank, ranks, virtual, False)) for k in range(count)]
    backwards: list[Computed] = [("backward", *_nth(k, rank, ranks, virtual, True)) for k in range(count)]
    warm = ranks - 1 - rank if virtual == 1 else 2 * (ranks - 1 - rank) + (virtual - 1) * ranks
    warm = min(warm, count)
    found = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards):
        found += [forward, backward]
    return found + backwards[count - warm:]


def _nth(k: int, rank: int, ranks: int, virtual: int, backward: bool) -> tuple[int, int]:
    """Stage and microbatch of a rank's k-th forward (backward): p microbatches through one virtual stage, then the next."""
    if virtual == 1:
        return rank, k
    round_, place = divmod(k, ranks * virtual)
    chunk, microbatch = place // ranks, round_ * ranks + place % ranks
    chunk = virtual - 1 - chunk if backward else chunk
    return chunk * ranks + rank, microbatch


def _check(schedule: str, ranks: int, virtual: int, microbatches: int) -> None:
    where = f"schedule {schedule}"
    if schedule not in SCHEDULES:
        raise BadInput(f"unknown schedule {schedule!r}", "schedule", f"legal ones: {', '.join(SCHEDULES)}")
    if microbatches < 1 or ranks < 1 or virtual < 1:
        raise BadInput(f"{ranks} ranks with {virtual} stages each and {microbatches} microbatches", where,
                       "every rank takes the same number of stages, one at least, and there is a microbatch")
    if schedule in ("gpipe", "1f1b") and virtual > 1:
        raise BadInput(f"{virtual} stages a rank under {schedule}, which takes one", where,
                       "leave virtual_stages out, or set the schedule to 'interleaved'")
    if schedule == "zbv" and virtual != 2:
        raise BadInput(f"{virtual} stages a rank under zbv, which takes two", where, "set virtual_stages=2: two stages a rank")
    if schedule == "interleaved" and microbatches % ranks:
        nearest = sorted({max(microbatches // ranks, 1) * ranks, -(-microbatches // ranks) * ranks})
        raise BadInput(f"{microbatches} microbatches on {ranks} ranks, of which interleaved 1F1B takes a multiple", where,
                       f"use {' or '.join(map(str, nearest))} microbatches, or another schedule (arXiv 2104.04473)")
