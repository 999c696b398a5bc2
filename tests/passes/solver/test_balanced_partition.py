"""Units with times and crossing bytes -> stage boundaries, against all cuts."""
from __future__ import annotations

import itertools
import random

import pytest

from passes.solver.balanced_partition import SLACK, equal_cut


def all_cuts(units: int, stages: int) -> list[list[int]]:
    return [[*ends, units] for ends in itertools.combinations(range(1, units), stages - 1)]


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_about_as_fast_as_it_can_be_and_then_least_crosses(seed):
    rng = random.Random(seed)
    units, stages = rng.randint(3, 8), rng.randint(1, 4)
    times = [rng.choice([0.0, 1.0, 1.02, 3.0]) for _ in range(units)]
    crossing = [rng.choice([1.0, 5.0]) for _ in range(units - 1)]

    def slowest(ends: list[int]) -> float:
        return max(sum(times[start:stop]) for start, stop in zip([0, *ends], ends))

    possible = [ends for ends in all_cuts(units, stages)
                if all(sum(times[start:stop]) > 0 for start, stop in zip([0, *ends], ends))]
    found = equal_cut(times, crossing, stages)
    if not possible:
        assert found is None
        return
    most = min(map(slowest, possible)) * (1 + SLACK)
    fast = [ends for ends in possible if slowest(ends) <= most]
    assert found in fast
    assert sum(crossing[k - 1] for k in found[:-1]) == min(sum(crossing[k - 1] for k in ends[:-1]) for ends in fast)


def test_an_even_row_is_cut_evenly():
    assert equal_cut([1.0] * 8, [4.0] * 7, 4) == [2, 4, 6, 8]
