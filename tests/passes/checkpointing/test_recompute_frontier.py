"""Random programs -> the corners of the hull of all choices of what to save."""
from __future__ import annotations

from itertools import combinations

import pytest

from passes.checkpointing.recompute_frontier import least_recompute_us, recompute_frontier
from passes.simulation.memory.memory_trace import simulate_memory
from tests.passes.checkpointing.storage_programs import chain, random_program


def every_choice(program, offloading: bool):
    """(us, bytes) of all subsets that may be saved, in memory or offloaded, by the simulation of the program."""
    assert len(program.candidates) <= 14
    for count in range(len(program.candidates) + 1):
        for saved in combinations(program.candidates, count):
            for number in range(count + 1 if offloading else 1):
                for away in combinations(saved, number):
                    if program.offloadable.issuperset(away):
                        walked = simulate_memory(program, set(saved) - set(away), away)
                        moved_us = sum(program.storages[s].offload_us for s in away)
                        yield (moved_us + sum(program.runs[k].us for k in walked.recomputed),
                               sum(program.storages[s].nbytes for s in walked.saved - walked.offloaded))


@pytest.mark.parametrize("seed", range(30))
def test_at_each_price_a_corner_is_the_best_of_all_choices(seed):
    offloading = seed % 3 == 0
    program = random_program(seed, 5 if offloading else 6 + seed % 4, offloading)
    corners = recompute_frontier(program, {k for k, run in enumerate(program.runs) if not run.backward})
    choices = set(every_choice(program, offloading))
    for price in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0, 100.0):
        best = min(us + price * nbytes for us, nbytes in choices)
        assert min(each.cost(price) for each in corners) == pytest.approx(best)
    for us, nbytes in choices:
        assert least_recompute_us(corners, nbytes) <= us + 1e-6


def test_storages_from_elsewhere_are_there_and_others_are_kept_on_demand():
    """The second of three: nothing, or itself for a byte of each of its 4."""
    program = chain([2, 4, 8], [3.0, 5.0, 7.0])
    assert [(each.us, each.nbytes) for each in recompute_frontier(program, {1})] == [(0.0, 4.0), (5.0, 0.0)]
    assert [(each.us, each.nbytes) for each in recompute_frontier(program, {1, 2}, kept={2})] == [(0.0, 12.0), (7.0, 4.0)]
    corners = recompute_frontier(program, {0, 1, 2})
    assert [each.nbytes for each in corners] == [14.0, 6.0, 2.0, 0.0], "the largest for its time first"
    assert least_recompute_us(corners, 10.0) == 3.5 and least_recompute_us(corners, 20.0) == 0.0
    assert least_recompute_us(recompute_frontier(program, {1}, kept={2}), 3.0) == float("inf")
