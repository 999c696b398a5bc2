"""Pipelines against the closed forms of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2)."""
from __future__ import annotations

import pytest

from passes.errors import BadInput
from passes.pipeline.pipeline_schedule import make_schedule as table_of
from passes.pipeline.pipeline_timeline import TimedStage, pipeline_tasks, simulate_pipeline
from passes.simulation.event_simulator import simulate_tasks
from passes.simulation.step_timeline import EmbeddedCommunication, breakdown, memory_over_time

FORWARD, BACKWARD = 3.0, 7.0


def end(stages, m, schedule, devices=None):
    built = pipeline_tasks(stages, m, schedule, devices)
    return built, simulate_tasks(built.tasks, [1.0] * len(built.intervals))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 2), (4, 8), (4, 3), (8, 32)])
def test_the_bubble_is_p_minus_1_over_m(schedule, p, m):
    built, spans = end([TimedStage(FORWARD, BACKWARD)] * p, m, schedule)
    ideal = m * (FORWARD + BACKWARD)
    assert spans.end_us == pytest.approx(ideal * (1 + (p - 1) / m))
    parts = breakdown(built.tasks, built.labels, spans, [1] * p)
    assert parts.bubble_us / parts.compute_us == pytest.approx((p - 1) / m)
    assert parts.exposed_communication_us == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 4, 3), (4, 8, 2), (4, 16, 4)])
def test_virtual_stages_divide_the_bubble(p, m, v):
    _, spans = end([TimedStage(FORWARD / v, BACKWARD / v)] * (p * v), m, "interleaved", p)
    assert spans.end_us == pytest.approx(m * (FORWARD + BACKWARD) * (1 + (p - 1) / (v * m)))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 2), (3, 3)])
def test_microbatches_in_flight(p, m):
    """gpipe holds all of them, 1f1b at most as many as there are stages from here on."""
    stages = [TimedStage(FORWARD, BACKWARD, activation_bytes=1000.0, held_bytes=5.0)] * p
    for schedule, expected in (("gpipe", [m] * p), ("1f1b", [min(m, p - d) for d in range(p)])):
        built, spans = end(stages, m, schedule)
        peaks = [max(b for _, b in memory_over_time(each, spans, held))
                 for each, held in zip(built.intervals, built.held_bytes)]
        assert peaks == [1000 * n + 5 for n in expected]


@pytest.mark.parametrize(("name", "p", "m", "v", "in_flight"), [
    ("gpipe", 4, 8, 1, [8] * 4), ("1f1b", 4, 8, 1, [4, 3, 2, 1]), ("1f1b", 4, 2, 1, [2, 2, 2, 1]),
    ("interleaved", 2, 4, 2, None),
])
def test_played_bubbles_and_microbatches_in_flight_are_those_of_closed_forms(name, p, m, v, in_flight):
    played = simulate_pipeline(table_of(name, p, m, v), [TimedStage(FORWARD / v, BACKWARD / v)] * (p * v))
    assert played.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert played.step_us == pytest.approx((FORWARD + BACKWARD) * (m + (p - 1) / v))
    assert in_flight is None or list(played.in_flight) == in_flight


@pytest.mark.parametrize(("name", "v"), [("zero_bubble", 1), ("zbv", 2)])
def test_gradients_of_weights_fill_bubbles(name, v):
    """ZB1P leaves (p - 1)(F + I - W) (Qi et al., arXiv 2401.10241, table 1), here 3 of 27."""
    played = simulate_pipeline(table_of(name, 4, 8, v), [TimedStage(1 / v, 2 / v)] * (4 * v))
    assert played.bubble == pytest.approx(3 / v / (24 + 3 / v))
    longer = simulate_pipeline(table_of(name, 4, 8, v), [TimedStage(1 / v, 2 / v, weight_us=0.0)] * (4 * v))
    assert longer.step_us > played.step_us


def test_one_microbatch_through_two_stages_by_hand():
    """F 3, send 1, F 3, B 7, return 2, B 7, then reduction 4 and optimizer 5."""
    first = TimedStage(3, 7, send_us=1, reduce_us=4, optimizer_us=5)
    last = TimedStage(3, 7, return_us=2)
    built, spans = end([first, last], 1, "1f1b")
    assert spans.end_us == 3 + 1 + 3 + 7 + 2 + 7 + 4 + 5
    parts = breakdown(built.tasks, built.labels, spans, [1, 1])
    # device 0: waits 3 + 7 while the other computes and 2 for the return; device 1: waits for 3 + 1, then for 7 + 4 + 5
    assert parts.bubble_us == pytest.approx(((3 + 7 + 2) + (3 + 1 + 7 + 4 + 5)) / 2)
    assert parts.exposed_communication_us == pytest.approx(((1 + 4) + 2) / 2)
    assert parts.optimizer_us == 5 / 2


def test_communication_inside_a_stage_is_no_computation():
    """Half of 3 forward, and 2 of 7 backward of which 1 is hidden, for each of four microbatches."""
    plain, split = TimedStage(3, 7), TimedStage(3, 7, forward_inside=EmbeddedCommunication(1.5, 1.5),
                                                backward_inside=EmbeddedCommunication(2, 1))
    alone, whole = ([breakdown(built.tasks, built.labels, spans, [1, 1]), spans.end_us]
                    for built, spans in (end([stage] * 2, 4, "1f1b") for stage in (plain, split)))
    assert alone[1] == whole[1] and alone[0].bubble_us == whole[0].bubble_us
    assert alone[0].compute_us - whole[0].compute_us == pytest.approx(4 * 2.5)
    assert whole[0].communication_us == pytest.approx(4 * 3.5)
    assert whole[0].exposed_communication_us == pytest.approx(4 * 2.5)


def test_the_slowest_stage_sets_the_pace():
    stages = [TimedStage(2, 4), TimedStage(5, 10), TimedStage(2, 4)]
    _, spans = end(stages, 20, "1f1b")
    assert 20 * 15 < spans.end_us <= 20 * 15 + 2 * (2 + 4)


@pytest.mark.parametrize(("count", "m", "schedule", "devices"), [
    (4, 0, "1f1b", None), (4, 2, "zigzag", None), (4, 4, "gpipe", 2), (4, 3, "interleaved", 2), (3, 2, "interleaved", 2),
    (0, 1, "1f1b", None), (3, 4, "zbv", 3),
])
def test_numbers_that_do_not_fit_are_refused(count, m, schedule, devices):
    with pytest.raises(BadInput):
        pipeline_tasks([TimedStage(1, 1)] * count, m, schedule, devices)
