"""Groups whose times must be asked for -> the best shares after few questions."""
from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.batch_balance.row_shares import best_shares
from passes.batch_balance.share_search import search_shares
from passes.batch_balance.time_estimates import FINEST, TimeEstimate


class Devices:
    """A group as a planner sees it: the cheapest of some strategies, each with a fixed time and a time per row; rows
    that the devices do not divide cost more, and more than `limit` rows do not fit."""

    def __init__(self, devices: int, lines: list[tuple[float, float]], uneven: float = 1.0, limit: float = math.inf):
        self.devices, self.lines, self.uneven, self.limit = devices, lines, uneven, limit
        self.asked: list[int] = []

    def time_us(self, rows: int) -> float | None:
        if rows > self.limit:
            return None
        factor = 1.0 if math.gcd(rows, self.devices) == self.devices else self.uneven
        return factor * min(fixed + slope * rows for fixed, slope in self.lines)

    def table(self, total: int) -> list[float]:
        times = [self.time_us(rows) for rows in range(total + 1)]
        return [0.0] + [math.inf if us is None else us for us in times[1:]]

    def ask(self, rows: int) -> float | None:
        self.asked.append(rows)
        return self.time_us(rows)


def run(groups: list[Devices], total: int, between_us: float = 0.0, first: tuple[int, ...] = (), **options):
    """`first`: numbers of rows that are asked about before the search."""
    estimates = [TimeEstimate(group.devices, total) for group in groups]
    for rows in first:
        for group, estimate in zip(groups, estimates, strict=True):
            estimate.learn(rows, group.ask(rows))
    return search_shares(estimates, lambda _: between_us, lambda g, rows: groups[g].ask(rows), **options)


@st.composite
def devices(draw, total: int):
    lines = draw(st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(0.5, 20.0)), min_size=1, max_size=3))
    count = draw(st.sampled_from([1, 2, 4, 8]))
    limit = draw(st.one_of(st.just(math.inf), st.integers(count, total).map(float)))  # else the group is not asked again
    return Devices(count, lines, draw(st.sampled_from([1.0, 1.3, 3.0])), limit)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(8, 64), st.floats(0.0, 300.0))
def test_asked_long_enough_the_answer_is_the_best(data, total, between_us):
    groups = [data.draw(devices(total)), data.draw(devices(total))]
    best = best_shares([group.table(total) for group in groups], total, lambda _: between_us)
    found = run(groups, total, between_us, tolerance=0.0, most_rounds=200)
    assert all(len(group.asked) == len(set(group.asked)) for group in groups), "nothing is asked twice"
    if best is None:
        assert found.shares is None
        return
    assert found.shares is not None and found.shares.step_us == pytest.approx(best.step_us, rel=1e-9)
    assert found.bound_us <= best.step_us * (1 + 1e-9)


def test_few_questions_are_enough():
    groups = [Devices(4, [(100.0, 4.0), (900.0, 1.0)], uneven=1.5), Devices(4, [(300.0, 12.0), (2500.0, 4.0)], uneven=1.5)]
    best = best_shares([group.table(1024) for group in groups], 1024, lambda _: 50.0)
    found = run(groups, 1024, 50.0, first=(1024, 512), tolerance=0.01)
    assert best is not None and found.shares is not None
    assert found.shares.step_us <= 1.01 * best.step_us
    assert max(len(group.asked) for group in groups) <= 7
    assert all(rows % 4 == 0 for rows in found.shares.rows)


def test_the_limit_of_memory_is_found_by_halving():
    fast, slow = Devices(4, [(0.0, 1.0)], limit=160), Devices(4, [(0.0, 10.0)])
    found = run([fast, slow], 1024, most_rounds=20)
    assert found.shares is not None and found.shares.rows == (160, 864)
    assert len(fast.asked) < 20


def test_a_group_that_nothing_fits_takes_no_rows():
    small = Devices(4, [(0.0, 1.0)], limit=3)
    found = run([small, Devices(4, [(0.0, 10.0)])], 64)
    assert found.shares is not None and found.shares.rows == (0, 64)
    assert small.asked == [4]
    assert run([small], 64).shares is None


def test_estimates_are_chords_below_a_concave_time():
    truth = Devices(4, [(0.0, 4.0), (60.0, 1.0)], uneven=2.0)
    estimate = TimeEstimate(4, 100)
    for rows in (40, 100):
        estimate.learn(rows, truth.time_us(rows))
    times, table = truth.table(100), estimate.table()
    assert all(table[rows] <= times[rows] + 1e-9 for rows in range(1, 101))
    assert (table[40], table[100]) == (100.0, 160.0) and table[70] == pytest.approx(130.0)
    estimate.learn(50, truth.time_us(50))  # 220: divided by 2 devices of 4 alone; divided by 4 it would be 125 at most
    assert estimate.table()[70] == pytest.approx(130.0 * 220.0 / 125.0) and estimate.table()[72] == pytest.approx(132.0)


def test_more_rows_that_are_divided_no_better_do_not_fit_either():
    estimate = TimeEstimate(4, 32)
    for rows, time_us in ((4, 10.0), (6, None)):
        estimate.learn(rows, time_us)
    table = estimate.table()
    assert math.isfinite(table[8]) and math.isinf(table[7]) and math.isinf(table[10])
    assert math.isfinite(table[5]), "fewer rows may fit"


@pytest.mark.parametrize("total", [2 * FINEST, 10007])
def test_a_very_large_batch_is_shared_in_coarse_parts(total):
    groups = [Devices(4, [(0.0, 1.0)]), Devices(4, [(0.0, 3.0)])]
    found = run(groups, total)
    assert found.shares is not None and found.shares.step_us == pytest.approx(0.75 * total, rel=0.02)
