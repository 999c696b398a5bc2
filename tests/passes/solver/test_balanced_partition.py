"""Units with times and crossing bytes -> stage boundaries, against all cuts."""
from __future__ import annotations

import itertools
import random

import pytest

from passes.pipeline.pipeline_schedule import make_schedule
from passes.pipeline.pipeline_timeline import TimedStage, simulate_pipeline
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
    least = min(sum(crossing[k - 1] for k in ends[:-1]) for ends in fast)
    assert sum(crossing[k - 1] for k in found[:-1]) == least
    cheap = [ends for ends in fast if sum(crossing[k - 1] for k in ends[:-1]) == least]
    even = [ends for ends in cheap if slowest(ends) == min(map(slowest, cheap))]
    assert squares(times, found) == pytest.approx(min(squares(times, ends) for ends in even))


def squares(times: list[float], ends: list[int]) -> float:
    return sum(sum(times[start:stop]) ** 2 for start, stop in zip([0, *ends], ends))


def test_stages_are_even_besides_the_slowest():
    """80 layers in 40 stages, with an embedding before and a head as long as 1.2 layers after them: all have two, but for one
    of three and the last one."""
    ends = equal_cut([0.05, *[1.0] * 80, 1.2], [1.0] * 81, 40)
    layers = [stop - start - (start == 0) - (stop == 82) for start, stop in zip([0, *ends], ends)]
    assert sorted(layers) == [1, *[2] * 38, 3]


@pytest.mark.parametrize(("head", "last"), [(4.0, 5), (1.0, 8), (0.1, 8)])
def test_a_stage_with_an_expensive_head_has_fewer_layers(head, last):
    ends = equal_cut([0.01, *[1.0] * 32, head], [1.0] * 33, 4)
    layers = [stop - start - (start == 0) - (stop == 34) for start, stop in zip([0, *ends], ends)]
    assert layers[-1] <= last and max(layers) - min(layers[:-1]) <= 1 and sum(layers) == 32


def test_an_even_row_is_cut_evenly():
    assert equal_cut([1.0] * 8, [4.0] * 7, 4) == [2, 4, 6, 8]


def test_a_rank_with_several_stages_has_no_more_work_than_others():
    """Llama 3 70B on 8 ranks with 5 stages each: at least as good as the layout `Et*2|(t*2|)*34,t*3|(t*2|)*3,tL` that trainers
    pin, in which the rank with the head has no stage of three layers."""
    ranks, times = make_schedule("interleaved", 8, 32, 5).ranks, [0.02, *[1.0] * 80, 1.14]
    ends = equal_cut(times, [1.0] * 81, 40, ranks)
    ours = [sum(times[start:stop]) for start, stop in zip([0, *ends], ends)]
    pinned = [2.02, *[2.0] * 34, 3.0, *[2.0] * 3, 2.14]
    found, known = ([sum(us for us, own in zip(each, ranks) if own == rank) for rank in range(8)] for each in (ours, pinned))
    assert max(found) == pytest.approx(11.0) and max(found) <= max(known)
    for microbatches in (8, 16, 64):
        table = make_schedule("interleaved", 8, microbatches, 5)
        played, other = (simulate_pipeline(table, [TimedStage(us / 3, 2 * us / 3) for us in each]).step_us
                         for each in (ours, pinned))
        assert played <= other
