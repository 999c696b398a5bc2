"""Tables of times -> the shares with the shortest step, against exhaustive search."""
from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.batch_balance.row_shares import best_shares, step_us
from passes.errors import BadInput

TIMES = st.one_of(st.just(math.inf), st.integers(0, 40).map(float), st.floats(1e-3, 100.0))


@st.composite
def cases(draw):
    """One to three groups, up to nine rows, any tables, and any times of adding up."""
    groups, total = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    tables = [[0.0, *draw(st.lists(TIMES, min_size=total, max_size=total))] for _ in range(groups)]
    extras = draw(st.lists(st.floats(0.0, 50.0), min_size=8, max_size=8))
    return tables, total, lambda active: extras[sum(1 << g for g in active)]


def every_way(tables, total, together_us):
    """(step, sum of times) of the best share by trying all of them."""
    found = []
    for rows in product(range(total + 1), repeat=len(tables)):
        if sum(rows) == total:
            active = tuple(g for g in range(len(rows)) if rows[g])
            times = [tables[g][rows[g]] for g in active]
            extra = together_us(active) if len(active) > 1 else 0.0
            found.append((max(times) + extra, math.fsum(times)))
    return min(found)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_agrees_with_trying_every_way(case):
    tables, total, together_us = case
    best_us, sum_us = every_way(*case)
    found = best_shares(tables, total, together_us)
    if math.isinf(best_us):
        assert found is None
        return
    assert found is not None and sum(found.rows) == total and min(found.rows) >= 0
    assert found.step_us == best_us == step_us(found.rows, tables, together_us)
    assert math.fsum(tables[g][b] for g, b in enumerate(found.rows) if b) == pytest.approx(sum_us)


def straight(us_per_row: float, total: int, fixed_us: float = 0.0) -> list[float]:
    return [0.0] + [fixed_us + us_per_row * rows for rows in range(1, total + 1)]


def test_rows_follow_speed():
    found = best_shares([straight(1.0, 40), straight(3.0, 40)], 40, lambda _: 0.0)
    assert found is not None and found.rows == (30, 10) and found.step_us == 30.0


@pytest.mark.parametrize(("between_us", "rows", "step"), [(9.0, (30, 10), 39.0), (11.0, (40, 0), 40.0)])
def test_a_group_is_left_out_when_adding_up_takes_longer_than_it_saves(between_us, rows, step):
    found = best_shares([straight(1.0, 40), straight(3.0, 40)], 40, lambda _: between_us)
    assert found is not None and (found.rows, found.step_us) == (rows, step)


def test_only_rows_that_divide_are_taken_where_others_cost_more():
    uneven = [us * (1.0 if rows % 4 == 0 else 3.0) for rows, us in enumerate(straight(1.0, 40))]
    found = best_shares([uneven, straight(3.1, 40)], 40, lambda _: 0.0)
    assert found is not None and found.rows == (32, 8)


def test_memory_ends_a_share():
    limited = [us if rows <= 20 else math.inf for rows, us in enumerate(straight(1.0, 40))]
    found = best_shares([limited, straight(3.0, 40)], 40, lambda _: 0.0)
    assert found is not None and found.rows == (20, 20) and found.step_us == 60.0
    assert best_shares([limited], 40, lambda _: 0.0) is None


def test_among_equally_fast_shares_the_least_work_is_taken():
    alone = 50.0
    found = best_shares([[0.0, 8.0, 6.0, 7.0, alone], [0.0, 9.0, 9.0, 9.0, alone]], 4, lambda _: 0.0)
    assert found is not None and found.rows == (2, 2) and found.step_us == 9.0


@pytest.mark.parametrize(("tables", "total"), [([], 4), ([[0.0, 1.0]] * 11, 1), ([[0.0, 1.0]], 2), ([[0.0]], 0)])
def test_refuses(tables, total):
    with pytest.raises(BadInput):
        best_shares(tables, total, lambda _: 0.0)
