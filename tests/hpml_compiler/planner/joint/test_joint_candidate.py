"""Bounds of configurations -> what fits, and the least that has to be recomputed."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpml_compiler.planner.joint.joint_candidate import JointCandidate
from hpml_compiler.planner.joint.open_decisions import OPEN_SCHEDULES, WITHOUT_STAGES
from hpml_compiler.planner.joint.stage_cost import LeastWork, StageCost
from passes.checkpointing.recompute_frontier import SavedChoice
from passes.pipeline.microbatches_in_flight import moments_of
from passes.pipeline.pipeline_schedule import make_schedule

CORNERS = SavedChoice(0.0, 80.0, frozenset()), SavedChoice(8.0, 40.0, frozenset()), SavedChoice(40.0, 0.0, frozenset())
COST = StageCost({"dp": 2}, 100.0, 100.0, 40.0, 1600.0, 1.0, 0.0, compute_us=100.0, parameter_bytes=20.0)
"""20 layers on two ranks: each saves 800 bytes; parameters, gradients and optimizer states take 40."""


def on_ranks(limit: float, microbatches: int = 1, stages: int = 1, schedule=WITHOUT_STAGES) -> JointCandidate:
    return JointCandidate(stages, COST, microbatches, limit, schedule, LeastWork(100.0, 90.0, layers=20, saved=CORNERS))


def test_what_does_not_fit_is_recomputed_at_the_least_price():
    """State without gradients is 30. 600 bytes are 60 of each layer, for half of the first step of the hull."""
    assert on_ranks(830.0).least_again_us == 0.0 and on_ranks(830.0).bound_us == 100.0
    assert on_ranks(630.0).least_again_us == pytest.approx(20 * 4.0 / 2) and on_ranks(630.0).bound_us == pytest.approx(140.0)
    assert on_ranks(430.0).least_again_us == pytest.approx(20 * 8.0 / 2)
    assert on_ranks(440.0, microbatches=2).least_again_us == 0.0, "of each microbatch, with gradients"
    assert on_ranks(39.0).bound_us == math.inf, "state alone is more"


def test_stages_have_their_own_layers_and_several_microbatches():
    """Four microbatches of 400 bytes a rank in all stages: the first stage has two of them in flight, the last one one."""
    (plain,) = (each for each in OPEN_SCHEDULES if each.name == "1f1b")
    assert on_ranks(200.0, 4, 2, plain).least_again_us == 0.0
    limited = on_ranks(100.0, 4, 2, plain)
    assert limited.least_again_us == pytest.approx(20 / 2 * (8.0 * (80 - 2 * 4 * (100 + 50) / 20) / 40))
    assert limited.bound_us > replace(limited, limit=200.0).bound_us


@pytest.mark.parametrize("schedule", [each for each in OPEN_SCHEDULES if each.name != "zbv"], ids=str)
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 4), (4, 4), (4, 12)])
def test_no_rank_has_fewer_microbatches_in_flight(schedule, stages, count):
    table = make_schedule(schedule.name, stages, count, schedule.virtual_stages)
    for rank in range(stages):
        own = [stage for stage, of in enumerate(table.ranks) if of == rank]
        moments = [(stage, moment) for stage, found in moments_of(table, rank, True).items() for moment in found[1]]
        most = max(1 + sum(moment[each].saved for each in own) for _, moment in moments) / schedule.virtual_stages
        assert on_ranks(1.0, count, stages, schedule)._in_flight(rank) <= most
