"""Cuts of a pipeline by which its slowest rank takes least time, from measured times."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.batch_balance.row_moves import WorkMove
from passes.pipeline.stage_assignment import StageAssignment, StageUnits
from passes.solver.balanced_partition import equal_cut

DIGITS = 3


@dataclass(frozen=True)
class StageMove(WorkMove):
    """speeds: of the ranks, relative to the fastest. ends: the first block after each stage, as cut for them."""

    speeds: tuple[float, ...]
    ends: tuple[int, ...]


def best_cut(stages: StageAssignment, ranks: Sequence[int], windows: Sequence[Sequence[float]]) -> StageMove | None:
    """The cut for the speeds of the ranks: what they compute by the time that it takes them. None where a rank computes nothing
    that is known. ranks: of the stages. windows: seconds of each rank, measured with these stages in one or more windows of
    steps: the cut follows their mean, and the gain is that of the window in which it is least, so that a disturbance moves
    nothing."""
    units, size = stages.units, max(ranks) + 1
    before = _of_ranks(units.work_us(stages.ends), ranks, size)
    if min(before) <= 0:
        return None
    means = [sum(each) / len(windows) for each in zip(*windows)]
    rates = [work / seconds for work, seconds in zip(before, means, strict=True)]
    speeds = tuple(float(f"{rate / max(rates):.{DIGITS}g}") for rate in rates)
    ends = cut_units(units, stages.count, ranks, speeds)
    if ends is None:
        return None
    after = _of_ranks(units.work_us(ends), ranks, size)
    times = [(max(window), max(own * then / work for own, then, work in zip(window, after, before, strict=True)))
             for window in windows]
    now_s, then_s = min(times, key=lambda each: each[0] - each[1])
    return StageMove(now_s, then_s, speeds, tuple(ends))


def cut_units(units: StageUnits, count: int, ranks: Sequence[int] = (), speeds: Sequence[float] = ()) -> list[int] | None:
    """Index of the first block after each stage; see `equal_cut`."""
    found = equal_cut(units.times_us, units.crossing, count, ranks, speeds)
    return None if found is None else [units.ends[end - 1] for end in found]


def _of_ranks(work: Sequence[float], ranks: Sequence[int], size: int) -> list[float]:
    found = [0.0] * size
    for rank, own in zip(ranks, work, strict=True):
        found[rank] += own
    return found
