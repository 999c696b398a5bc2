"""Estimates of configurations, and what plans of some of them take -> which are planned."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hpml_compiler.options import Options
from hpml_compiler.planner.joint.joint_candidate import JointCandidate
from hpml_compiler.planner.joint.joint_search import FoundPlan, JointSearch
from hpml_compiler.planner.joint.open_decisions import OpenSchedule
from hpml_compiler.planner.joint.stage_cost import StageCost
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit

COST = StageCost({"dp": 2}, 200.0, 100.0, 40.0, 1.0, 1.0, 0.0, compute_us=200.0)


class Taken(JointSearch):
    """A search whose plans take these µs, by schedule."""

    taken: dict[str, float]

    def _plan(self, candidate: JointCandidate, part: WorkLimit, last: bool = False) -> None:
        us = self.taken[candidate.schedule.name]
        self._correct(candidate, us, 0.0)
        self.found.append(FoundPlan(us, us, cast(Any, None), candidate))


def planned(**taken: float) -> list[str]:
    traces = SimpleNamespace(options=Options())
    decisions = SimpleNamespace(cluster=Cluster.parse("1x4:a100-40g"))
    search = Taken(cast(Any, traces), cast(Any, decisions), cast(Any, None), None, Infeasible("no room", "here", "more"),
                   WorkLimit(30.0))
    search.taken = taken
    schedules = OpenSchedule("zbv", 2, 0.2), OpenSchedule("zero_bubble", 1, 0.4), OpenSchedule("interleaved", 2, 0.6)
    search._plan_all([JointCandidate(2, COST, 10, 1e9, schedule) for schedule in schedules])
    return [each.candidate.schedule.name for each in search.found]


def test_another_schedule_is_planned_unless_its_own_estimate_is_above_the_best_plan():
    """Estimates: 102, 104 and 106 µs."""
    assert planned(zbv=105.0, zero_bubble=103.0, interleaved=90.0) == ["zbv", "zero_bubble"]
    assert planned(zbv=103.0, zero_bubble=103.0, interleaved=90.0) == ["zbv"]
    assert planned(zbv=107.0, zero_bubble=110.0, interleaved=108.0) == ["zbv", "zero_bubble", "interleaved"]
