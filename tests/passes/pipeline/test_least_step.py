"""Random pipelines, played -> no step below the bound of their work."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.pipeline.least_step import (
    least_even_us,
    least_interleaved_us,
    least_of_layers_us,
    least_step_us,
    least_with_end_us,
)
from passes.pipeline.pipeline_schedule import make_schedule
from passes.pipeline.pipeline_timeline import TimedStage, simulate_pipeline
from passes.solver.balanced_partition import equal_cut

TIMES = st.floats(0.1, 5.0)


@st.composite
def stages_of(draw, split: bool):
    """Stages with the forward share of their layers' work, and other work on top, such as communication."""
    share, found = draw(st.floats(0.1, 0.9)), []
    for _ in range(draw(st.integers(2, 6))):
        work, more = draw(TIMES), draw(st.sampled_from([0.0, 0.5, 2.0]))
        forward = work * (share if split else draw(st.floats(0.1, 0.9)))
        backward = work - forward + more
        weight = draw(st.floats(0.0, 1.0)) * backward if split else None
        found.append((work, work + more, TimedStage(forward, backward, 0.0, 0.0, weight_us=weight)))
    return share if split else 1.0, found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_played_pipeline_takes_less(schedule, data):
    waited, drawn = data.draw(stages_of(schedule == "zero_bubble"))
    through, work, timed = zip(*drawn)
    count = data.draw(st.sampled_from([len(drawn), len(drawn) + 1, 3 * len(drawn)]))
    played = simulate_pipeline(make_schedule(schedule, len(drawn), count, 1), timed).step_us
    bound = least_step_us(count * sum(work), count * sum(through), len(drawn), count, waited)
    assert count * sum(work) / len(drawn) <= bound * (1 + 1e-9) and bound <= played * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_played_pipeline_with_several_stages_on_a_rank_takes_less(data):
    ranks, virtual = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 3))
    sizes = st.one_of(st.just(1e-3), TIMES)
    work = [data.draw(sizes) for _ in range(ranks * virtual)]
    more = [data.draw(st.sampled_from([0.0, 0.5, 2.0])) for _ in work]
    share = [data.draw(st.floats(0.1, 0.9)) for _ in work]
    count = ranks * data.draw(st.integers(1, 4))
    timed = [TimedStage(part * us, (1 - part) * us + extra, 0.0, 0.0) for part, us, extra in zip(share, work, more)]
    played = simulate_pipeline(make_schedule("interleaved", ranks, count, virtual), timed).step_us
    bound = least_interleaved_us(count * (sum(work) + sum(more)), count * sum(work), ranks, count, virtual)
    assert count * sum(work) / ranks <= bound * (1 + 1e-9) and bound <= played * (1 + 1e-9)


def test_one_stage_on_each_rank_is_no_special_case():
    for stages, count in ((2, 2), (4, 24), (8, 96)):
        assert least_interleaved_us(1.0, 1.0, stages, count, 1) == pytest.approx(least_step_us(1.0, 1.0, stages, count))
        assert 1 / stages < least_interleaved_us(1.0, 1.0, stages, count, 2) < least_interleaved_us(1.0, 1.0, stages, count, 1)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 24), (8, 96)])
def test_work_that_all_passes_through_has_a_closed_form(stages, microbatches):
    closed = 1 / microbatches / (1 - (1 - 1 / microbatches) ** stages)
    assert least_step_us(1.0, 1.0, stages, microbatches) == pytest.approx(closed)


def test_one_stage_waits_for_nothing_and_one_microbatch_for_all():
    assert least_step_us(7.0, 5.0, 1, 4) == pytest.approx(7.0)
    assert least_step_us(1.0, 1.0, 4, 1) == pytest.approx(1.0)


def test_layers_are_not_divided():
    assert least_of_layers_us(96.0, 96, 64) == 2.0 and least_of_layers_us(96.0, 96, 32) == 3.0
    assert least_of_layers_us(0.0, 0, 4) == 0.0


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_even_cut_of_equal_layers_takes_less(schedule, virtual, data):
    ranks, share = data.draw(st.integers(2, 4)), data.draw(st.floats(0.1, 0.9))
    layers, count = data.draw(st.integers(ranks * virtual, 24)), ranks * data.draw(st.integers(1, 4))
    ends = [data.draw(st.sampled_from([0.0, 0.3, 1.7, 4.0])) for _ in range(2)]
    times, stages = [ends[0] or 1e-9, *[1.0] * layers, ends[1] or 1e-9], ranks * virtual
    table, splits = make_schedule(schedule, ranks, count, virtual), schedule == "zero_bubble"
    cut = equal_cut(times, [0.0] * (len(times) - 1), stages, table.ranks)
    assert cut is not None
    fewest, timed, own = layers // stages, [], []
    for start, stop in zip([0, *cut], cut):
        work = sum(times[start:stop])
        own.append(work)
        assert fewest <= work * (1 + 1e-9), "whatever is around the layers"
        only = work - (start == 0) * ends[0] - (stop == len(times)) * ends[1] if splits else work  # ends go backward only
        weight = 0.5 * (1 - share) * only if splits else None
        timed.append(TimedStage(share * only, work - share * only, 0.0, 0.0, weight_us=weight))
    played = simulate_pipeline(table, timed).step_us
    waits = [0.0, *[share * fewest] * (stages - 1)] if splits else [fewest] * stages
    bound = least_even_us(count * sum(own), [count * fewest] * stages, [count * each for each in waits], ranks, count)
    assert count * layers / ranks <= bound * (1 + 1e-9) and bound <= played * (1 + 1e-9)
    wait = share if splits else 1.0
    whole = least_with_end_us(layers, count, count, count * ends[1], ranks, (ranks - 1) * fewest * wait,
                              wait if virtual == 1 else 0.0)
    assert whole <= played * (1 + 1e-9)


def test_a_rank_has_what_comes_after_the_layers_besides_whole_ones():
    """96 layers and a third of one, over 32 ranks: 3 and the third. Two layers in place of the end would be 4 on others."""
    assert least_with_end_us(96, 1.0, 1.0, 0.33, 32, 0.0, 0.0) == pytest.approx(3.33)
    assert least_with_end_us(96, 1.0, 1.0, 1.5, 32, 0.0, 0.0) == 4.0, "its rank has two layers, another one four"
    assert least_with_end_us(96, 1.0, 1.1, 0.33, 32, 0.2, 0.001) == pytest.approx(1.0 + 2.2 + 0.33 + 0.2)
    assert least_with_end_us(96, 1.0, 1.0, 0.33, 32, 0.2, 0.005) == pytest.approx(3.33 + 0.465), "it waits for others"


def test_even_stages_wait_as_long_as_they_are():
    """Without ends, and with as many layers on each stage: the bubble of 1F1B, and half of it with two stages on a rank."""
    assert least_even_us(8.0, [2.0] * 4, [2.0] * 4, 4, 8) == pytest.approx(2.0 * (1 + 3 / 8))
    assert least_step_us(8.0, 8.0, 4, 8) < 2.0 * (1 + 3 / 8)
    assert least_even_us(8.0, [1.0] * 8, [1.0] * 8, 4, 8) == pytest.approx(2.0 * (1 + 3 / 16))
    assert least_even_us(12.0, [2.0] * 4, [2.0] * 4, 4, 8) == pytest.approx(3.0 + 2.0 * 1.5 / 8), "more work, wherever it is"
