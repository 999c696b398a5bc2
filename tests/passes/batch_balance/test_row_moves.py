"""Measured times -> numbers of rows, against all others, and whether a move pays."""
from __future__ import annotations

from itertools import product

import pytest

from passes.batch_balance.row_moves import RowMove, best_move


@pytest.mark.parametrize("rows, seconds, unit", [
    ((4, 4), (1.0, 2.0), 1), ((6, 2), (1.0, 1.0), 1), ((4, 4, 4), (1.0, 1.5, 3.0), 1), ((8, 8), (1.0, 3.1), 2),
    ((1, 7), (9.0, 1.0), 1)])
def test_no_other_rows_have_a_shorter_slowest_one(rows, seconds, unit):
    found = best_move(rows, [seconds], unit)
    assert sum(found.rows) == sum(rows) and all(count >= unit and count % unit == 0 for count in found.rows)
    others = (each for each in product(range(unit, sum(rows), unit), repeat=len(rows)) if sum(each) == sum(rows))
    shortest = min(max(n * s / r for n, s, r in zip(each, seconds, rows)) for each in others)
    assert found.then_s == pytest.approx(shortest) and found.now_s == max(seconds)
    bound = sum(rows) / sum(r / s for r, s in zip(rows, seconds))  # the linear program's, with fractions of rows
    assert found.then_s <= bound + unit * max(s / r for r, s in zip(rows, seconds))


@pytest.mark.parametrize("then_s, steps, cost_s, pays", [
    (0.5, 20, 5.0, True), (0.5, 20, 11.0, False), (0.95, 1000, 0.0, False)])
def test_a_move_pays_where_it_saves_more_than_it_costs_and_more_than_noise(then_s, steps, cost_s, pays):
    assert RowMove(1.0, then_s, (1, 1)).pays(steps, cost_s) == pays


def test_a_window_that_was_disturbed_moves_nothing():
    quiet, disturbed = (1.0, 1.0), (1.0, 3.0)
    assert best_move((8, 8), [disturbed, disturbed]).pays(1000, 0.0)
    assert not best_move((8, 8), [quiet, disturbed]).pays(1000, 0.0)
