"""Events against hand-computed spans, lower bounds and impossible states."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.simulation.event_simulator import COMMUNICATION, COMPUTE, StreamTask, least_overlapped_us, simulate_tasks


def test_streams_run_beside_each_other_and_each_in_turn():
    """10 of compute; then 5 more, beside a collective of 8, which a last task waits for."""
    tasks = [StreamTask(10), StreamTask(8, COMMUNICATION, (0,)), StreamTask(5, COMPUTE, (0,)), StreamTask(1, COMPUTE, (1, 2))]
    spans = simulate_tasks(tasks)
    assert list(zip(spans.start_us, spans.stop_us)) == [(0, 10), (10, 18), (10, 15), (18, 19)]


@pytest.mark.parametrize(("contention", "end"), [(1.0, 10.0), (1.5, 11.0), (2.0, 12.0)])
def test_contention_slows_both_while_both_run(contention, end):
    """10 beside 2: the short one takes 2c, in which the long one advances by 2; 8 are left at full speed."""
    spans = simulate_tasks([StreamTask(10), StreamTask(2, COMMUNICATION)], [contention])
    assert spans.stop_us == pytest.approx([end if contention == 1 else 2 * contention + 8, 2 * contention])


def test_a_task_on_two_lanes_waits_for_both_and_goes_at_the_slower_speed():
    tasks = [StreamTask(4, lanes=(0,)), StreamTask(7, lanes=(1,)), StreamTask(3, COMMUNICATION, (0, 1), lanes=(0, 1)),
             StreamTask(6, COMPUTE, (0, 1), lanes=(1,))]
    spans = simulate_tasks(tasks, [2.0, 2.0])
    assert (spans.start_us[2], spans.stop_us[2]) == (7, 13)  # half speed: lane 1 computes meanwhile
    assert spans.stop_us[3] == 16


def test_of_what_is_ready_the_least_priority_number_goes_first():
    tasks = [StreamTask(1, COMMUNICATION, priority=2), StreamTask(1, COMMUNICATION, priority=1),
             StreamTask(1, COMMUNICATION, priority=3)]
    assert simulate_tasks(tasks).start_us == [1, 0, 2]


def test_tasks_of_no_time_keep_their_place():
    spans = simulate_tasks([StreamTask(5), StreamTask(0, COMMUNICATION, (0,)), StreamTask(0, COMPUTE, (1,)),
                            StreamTask(2, COMPUTE, (2,))])
    assert spans.stop_us == [5, 5, 5, 7]


@pytest.mark.parametrize(("tasks", "contention", "message"), [
    ([StreamTask(1, after=(1,)), StreamTask(1, after=(0,))], (1.0,), "waits for"),
    ([StreamTask(-1)], (1.0,), "takes -1"),
    ([StreamTask(float("nan"))], (1.0,), "takes nan"),
    ([StreamTask(1)], (2.5,), "contention"),
    ([StreamTask(1, lanes=(1,))], (1.0,), "lanes"),
    ([StreamTask(1, after=(7,))], (1.0,), "not there"),
    ([StreamTask(1, stream=2)], (1.0,), "stream 2"),
])
def test_what_cannot_be_run_is_refused(tasks, contention, message):
    with pytest.raises(ValueError, match=message):
        simulate_tasks(tasks, contention)


@st.composite
def graphs(draw):
    """Tasks of whole µs on up to 3 lanes, each after some of those before it."""
    lanes = draw(st.integers(1, 3))
    tasks = []
    for i in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        on = draw(st.lists(st.integers(0, lanes - 1), min_size=1, max_size=lanes, unique=True))
        tasks.append(StreamTask(draw(st.integers(0, 20)), draw(st.sampled_from([COMPUTE, COMMUNICATION])), tuple(after),
                                tuple(on), draw(st.integers(0, 3))))
    return tasks, lanes


def critical_path(tasks):
    ends = []
    for task in tasks:
        ends.append(task.us + max((ends[i] for i in task.after), default=0))
    return max(ends)


@given(graphs(), st.sampled_from([1.0, 1.2, 2.0]))
def test_every_schedule_keeps_order_and_streams_and_no_bound_is_beaten(graph, contention):
    tasks, lanes = graph
    spans = simulate_tasks(tasks, [contention] * lanes)
    for task, start, stop in zip(tasks, spans.start_us, spans.stop_us):
        assert task.us - 1e-9 <= stop - start <= contention * task.us + 1e-9
        assert all(spans.stop_us[i] <= start + 1e-9 for i in task.after)
    total = 0.0
    for lane in range(lanes):
        for stream in (COMPUTE, COMMUNICATION):
            own = sorted((spans.start_us[i], spans.stop_us[i]) for i, t in enumerate(tasks)
                         if lane in t.lanes and t.stream == stream)
            assert all(b[0] >= a[1] - 1e-9 for a, b in zip(own, own[1:]))
            assert spans.end_us >= sum(t.us for t in tasks if lane in t.lanes and t.stream == stream) - 1e-9
    total = sum(task.us for task in tasks)
    assert critical_path(tasks) - 1e-9 <= spans.end_us <= contention * total + 1e-9


@given(graphs())
def test_one_lane_with_contention_2_gains_nothing_from_overlap(graph):
    """Work goes on at speed 1 or twice 1/2, so a lane that never idles takes the sum of all work."""
    tasks = [StreamTask(t.us, t.stream) for t in graph[0]]
    spans = simulate_tasks(tasks, [2.0])
    assert spans.end_us == pytest.approx(sum(t.us for t in tasks))


@given(graphs())
def test_a_chain_takes_the_sum(graph):
    tasks = [StreamTask(t.us, t.stream, (i - 1,) if i else ()) for i, t in enumerate(graph[0])]
    assert simulate_tasks(tasks, [2.0]).end_us == sum(t.us for t in tasks)


@given(st.lists(st.tuples(st.sampled_from([COMPUTE, COMMUNICATION]), st.floats(0.0, 9.0), st.integers(0, 3)), min_size=1,
                max_size=12), st.floats(1.0, 2.0), st.floats(0.0, 1.0))
def test_no_tasks_of_a_lane_end_before_their_bound(drawn, contention, part):
    """part: of the computation that the bound knows."""
    tasks = [StreamTask(us, stream, (k - back,) if 0 < back <= k else (), priority=k)
             for k, (stream, us, back) in enumerate(drawn)]
    computing = sum(each.us for each in tasks if each.stream == COMPUTE)
    bound = least_overlapped_us(sum(each.us for each in tasks), part * computing, contention)
    assert bound <= simulate_tasks(tasks, [contention]).end_us + 1e-9
