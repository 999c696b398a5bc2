"""Rows and proportions -> numbers of rows by coordinate, and the axes that have unequal ones."""
from __future__ import annotations

import pytest

from passes.batch_balance.row_counts import apportioned, with_rows
from passes.hardware.axis import Axis, time_axis


@pytest.mark.parametrize("rows, weights, expected", [
    (8, (5, 3), (5, 3)), (16, (5, 3), (10, 6)), (4, (5, 3), (3, 1)), (10, (1, 1, 1, 1), (3, 3, 2, 2)), (8, (1, 1), (4, 4)),
    (7, (1, 2), (2, 5)), (2, (1, 1, 1), (1, 1, 0)), (0, (5, 3), (0, 0)),
])
def test_rows_are_in_proportion(rows, weights, expected):
    assert apportioned(rows, weights) == expected


def test_only_axes_with_unequal_numbers_have_rows():
    axes = (Axis("dp", 2), Axis("tp", 3), Axis("x", 4), time_axis(3))
    assert with_rows(axes, 8, {}) == axes, "tp does not split the batch, nor does time"
    assert [axis.rows for axis in with_rows(axes, 10, {})] == [(), (), (3, 3, 2, 2), ()]
    assert [axis.rows for axis in with_rows(axes, 8, {"dp": (5, 3)})] == [(5, 3), (), (), ()]
    assert with_rows(axes, 1, {"dp": (5, 3)}) == axes, "a rank would have no row"


def test_parts_of_a_dim():
    axis = Axis("dp", 2, rows=(5, 3))
    assert (axis.parts(16, True), axis.parts(16, False)) == ((10, 6), (8, 8))
    assert (axis.parts(12, True), axis.parts(7, False)) == ((), ())
    assert (axis.part(16, True), axis.part(16, True, 1), axis.fullest, axis.share()) == (10, 6, 0, 0.625)
