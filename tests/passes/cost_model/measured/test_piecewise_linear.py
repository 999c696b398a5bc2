"""Piecewise linear fits: known curves are found again, noise is not followed, and nothing ever falls."""
from __future__ import annotations

import math
import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.cost_model.measured.piecewise_linear import (
    PiecewiseLinear,
    _best,
    _nonnegative,
    fit_piecewise,
    left_out_errors,
    relative_errors,
)

SIZES = [2.0**k for k in range(10, 27)]
SEEN, UNSEEN = SIZES[::2], SIZES[1::2]
LINE = PiecewiseLinear((0.0, 2.0**26), (300.0, 300.0 + 2.0**26 * 1e-3))
BENT = PiecewiseLinear((0.0, 2.0**16, 2.0**22, 2.0**26), (100.0, 150.0, 2000.0, 120000.0))
TIMES = st.lists(st.floats(0.1, 1e6), min_size=2, max_size=9)


def noisy(curve: PiecewiseLinear, sizes: list[float], relative: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [curve(x) * math.exp(draw.gauss(0, relative)) for x in sizes]


def test_values_at_between_and_beyond_the_knots():
    curve = PiecewiseLinear((0.0, 10.0, 20.0), (1.0, 2.0, 6.0))
    assert [curve(x) for x in (0, 5, 10, 15, 20, 30)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert (curve.alpha_us, curve.beta_us_per_byte, curve.pieces) == (1.0, 0.4, 2)


@pytest.mark.parametrize("curve", [LINE, BENT], ids=["line", "bent"])
def test_an_exact_curve_is_found_again(curve):
    fit = fit_piecewise(SIZES, [curve(x) for x in SIZES])
    assert fit.pieces == curve.pieces
    assert fit.knots == curve.knots
    assert fit.values == pytest.approx(curve.values, rel=1e-6)


@pytest.mark.parametrize("curve", [LINE, BENT], ids=["line", "bent"])
@pytest.mark.parametrize("seed", range(5))
def test_sizes_not_seen_are_predicted_from_noisy_ones(curve, seed):
    fit = fit_piecewise(SEEN, noisy(curve, SEEN, 0.05, seed))
    assert np.median(relative_errors(fit, UNSEEN, [curve(x) for x in UNSEEN])) <= 0.1


def test_one_piece_where_one_is_the_truth_and_more_where_it_bends():
    lines = [fit_piecewise(SEEN, noisy(LINE, SEEN, 0.1, seed)).pieces for seed in range(20)]
    bends = [fit_piecewise(SEEN, noisy(BENT, SEEN, 0.1, seed)).pieces for seed in range(20)]
    assert lines.count(1) >= 14 and min(bends) >= 2


def test_left_out_errors_are_those_of_fits_without_the_size():
    times = noisy(BENT, SEEN, 0.1)
    errors = left_out_errors(SEEN, times)
    assert len(errors) == len(SEEN) - 2
    without = fit_piecewise(SEEN[:3] + SEEN[4:], times[:3] + times[4:])
    assert errors[2] == pytest.approx(abs(without(SEEN[3]) - times[3]) / times[3])
    assert left_out_errors(SEEN[:3], times[:3]) == []


@given(TIMES)
def test_fits_never_fall_and_are_never_negative(times):
    fit = fit_piecewise([4.0**k for k in range(5, 5 + len(times))], times)
    assert fit.values[0] >= 0
    assert all(low <= high for low, high in zip(fit.values, fit.values[1:]))


@given(TIMES)
def test_no_other_increments_and_knots_have_a_smaller_error(times):
    x = np.array([4.0**k for k in range(5, 5 + len(times))])
    y = np.array(times)
    for pieces in range(1, min(3, len(x) - 1) + 1):
        fit = _best(x, y, pieces)
        own = sum(e * e for e in relative_errors(fit, x.tolist(), times))
        draw = random.Random(len(times))
        for knots in combinations(x[1:-1].tolist(), pieces - 1):
            for _ in range(5):
                values = np.cumsum([v * draw.uniform(0.8, 1.2) for v in np.diff(fit.values, prepend=0.0)])
                other = PiecewiseLinear((0.0, *knots, float(x[-1])), tuple(values.tolist()))
                assert own <= sum(e * e for e in relative_errors(other, x.tolist(), times)) + 1e-9


@given(st.integers(2, 5), st.integers(0, 10**6))
def test_least_squares_without_negative_unknowns_against_all_sets(count, seed):
    rows = np.random.default_rng(seed).uniform(0, 1, (8, count)) - 0.3
    error, found = _nonnegative(rows)
    best = float(len(rows))
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            solution = np.linalg.lstsq(rows[:, chosen], np.ones(8), rcond=None)[0]
            if (solution >= 0).all():
                best = min(best, float(np.square(rows[:, chosen] @ solution - 1).sum()))
    assert (found >= 0).all()
    assert error == pytest.approx(best) == pytest.approx(float(np.square(rows @ found - 1).sum()))


def test_sizes_may_repeat():
    fit = fit_piecewise([1024, 1024, 4096, 4096], [9.0, 11.0, 39.0, 41.0])
    assert fit(1024) == pytest.approx(10, rel=0.05) and fit(4096) == pytest.approx(40, rel=0.05)


@pytest.mark.parametrize(("sizes", "times"), [
    ([1024], [1.0]), ([1024, 1024], [1.0, 2.0]), ([1024, 2048], [1.0]), ([0, 1024], [1.0, 1.0]),
    ([1024, 2048], [0.0, 1.0]), ([1024, 2048], [1.0, math.inf]),
])
def test_what_has_no_curve_is_refused(sizes, times):
    with pytest.raises(ValueError, match="need"):
        fit_piecewise(sizes, times)


@pytest.mark.parametrize(("knots", "values"), [((0.0,), (1.0,)), ((1.0, 2.0), (1.0, 1.0)), ((0.0, 0.0), (1.0, 1.0)),
                                               ((0.0, 1.0), (1.0,))])
def test_what_is_no_curve_is_refused(knots, values):
    with pytest.raises(ValueError, match="knot"):
        PiecewiseLinear(knots, values)
