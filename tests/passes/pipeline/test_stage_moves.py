"""Times of ranks -> the cut after which the slowest takes least, against all cuts."""
from __future__ import annotations

import itertools

import pytest

from passes.json_records import FrozenMap
from passes.pipeline.stage_assignment import StageAssignment, StageUnits
from passes.pipeline.stage_moves import best_cut


def stages_of(units: tuple[float, ...], ends: tuple[int, ...]) -> StageAssignment:
    blocks = tuple(tuple(f"layers.{k}" for k in range(start, stop)) for start, stop in itertools.pairwise((0, *ends)))
    made = StageUnits(tuple(range(1, len(units) + 1)), units, (1.0,) * (len(units) - 1))
    return StageAssignment(len(ends), FrozenMap(), frozenset(), (), FrozenMap(), frozenset(), FrozenMap(), blocks, (), (), made)


@pytest.mark.parametrize(("units", "ends", "ranks", "slowness"), [
    ((1.0,) * 12, (6, 12), (0, 1), (2.0, 1.0)), ((1.0,) * 12, (4, 8, 12), (0, 1, 2), (1.0, 3.0, 1.0)),
    ((3.0, 1.0, 1.0, 2.0, 1.0, 4.0), (3, 6), (0, 1), (1.0, 2.5)), ((1.0,) * 8, (2, 4, 6, 8), (0, 1, 0, 1), (1.0, 2.0))])
def test_the_slowest_rank_takes_about_as_little_as_it_can(units, ends, ranks, slowness) -> None:
    def seconds(cut: tuple[int, ...]) -> list[float]:
        found = [0.0] * len(slowness)
        for rank, start, stop in zip(ranks, (0, *cut), cut):
            found[rank] += slowness[rank] * sum(units[start:stop])
        return found

    stages = stages_of(units, ends)
    assert stages.ends == ends
    move = best_cut(stages, ranks, [seconds(ends)] * 2)
    assert move is not None and move.now_s == max(seconds(ends)) and move.then_s == pytest.approx(max(seconds(move.ends)))
    least = min(max(seconds((*cut, len(units)))) for cut in itertools.combinations(range(1, len(units)), len(ends) - 1))
    assert move.then_s <= 1.05 * least + (0 if len(set(ranks)) == len(ranks) else max(units) * max(slowness))
    assert move.pays(100, 1.0)


def test_a_disturbance_moves_nothing() -> None:
    stages = stages_of((1.0,) * 8, (4, 8))
    move = best_cut(stages, (0, 1), [[8.0, 4.0], [4.0, 4.0]])
    assert move is not None and not move.pays(1000, 0.0)
    assert best_cut(stages_of((1.0, 0.0), (1, 2)), (0, 1), [[1.0, 1.0]]) is None, "a rank computes nothing that is known"
