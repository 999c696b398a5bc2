"""Points -> the Pareto front: points that no other beats."""
from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from hpml_compiler.instruments.energy_studies.pareto_front import InfeasiblePoint, ParetoPoint, Sweep, non_dominated


def point(time_s: float, energy_j: float, **changes) -> ParetoPoint:
    given = {"devices": 4, "mesh": {"x": 4}, "power_cap_w": None, "objective": "time", "power_w": 100.0,
             "energy_label": "estimated", "peak_bytes": 1}
    return ParetoPoint(step_time_s=time_s, energy_j=energy_j, **{**given, **changes})


numbers = st.integers(0, 12).map(float)  # few, so that ties are frequent
clouds = st.lists(st.builds(point, numbers, numbers), max_size=25)


def beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    """No worse in both, better in one."""
    ours, theirs = (one.step_time_s, one.energy_j), (other.step_time_s, other.energy_j)
    return all(a <= b for a, b in zip(ours, theirs)) and ours != theirs


@given(clouds)
def test_the_front_is_what_nothing_beats_and_everything_else_is_beaten_by_it(points):
    front = non_dominated(points)
    unbeaten = {(p.step_time_s, p.energy_j) for p in points if not any(beats(other, p) for other in points)}
    assert [(p.step_time_s, p.energy_j) for p in front] == sorted(unbeaten)
    assert all(any(beats(f, p) for f in front) for p in points if (p.step_time_s, p.energy_j) not in unbeaten)


def test_of_equal_points_the_first_is_taken():
    first, second = point(1.0, 2.0, objective="time"), point(1.0, 2.0, objective="energy")
    assert non_dominated([second, first]) == [second] and non_dominated([first, second]) == [first]


def test_json_marks_the_front_and_keeps_the_rest():
    sweep = Sweep("1x4:cpu", (point(3.0, 1.0), point(1.0, 3.0), point(3.0, 3.0)),
                  (InfeasiblePoint(2, None, 5.0, "time", "too big"),))
    found = json.loads(json.dumps(sweep.to_json(), allow_nan=False))
    assert [(p["step_time_s"], p["energy_j"], p["on_front"]) for p in found["points"]] == [
        (1.0, 3.0, True), (3.0, 1.0, True), (3.0, 3.0, False)]
    assert found["missed"] == [{"devices": 2, "mesh": None, "power_cap_w": 5.0, "objective": "time", "reason": "too big"}]
