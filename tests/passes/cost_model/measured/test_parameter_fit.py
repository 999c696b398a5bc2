"""Rows made with known efficiencies -> the fit finds these; rows that say nothing of a parameter -> it stays."""
from __future__ import annotations

import math

import numpy as np
import pytest

from passes.cost_model.measured.parameter_fit import FitParameter, fit, leave_one_out, relative_error
from passes.errors import BadInput

TRUE = {"matmul": 0.55, "attention": 0.12, "memory": 0.8}
PARAMETERS = (FitParameter("matmul", 0.7, 0.15), FitParameter("attention", 0.5, 0.7), FitParameter("memory", 0.9, 0.15))
WORK = np.array([[6.0, 0.1, 1.0], [1.0, 0.8, 0.2], [0.5, 0.1, 4.0], [3.0, 0.3, 0.3], [2.0, 0.02, 2.0], [0.2, 0.5, 0.1]])
"""Seconds of each row at efficiency 1, by parameter; a step takes their sum over the efficiencies."""


def predict(row, values):
    return float(sum(WORK[row, k] / values[name] for k, name in enumerate(TRUE)))


MEASURED = [predict(row, TRUE) for row in range(len(WORK))]


def test_rows_of_known_efficiencies_give_these():
    found = fit(predict, MEASURED, PARAMETERS)
    for name, value in TRUE.items():
        assert found.values[name] == pytest.approx(value, rel=0.03)
    assert found.predicted_s == pytest.approx(MEASURED, rel=0.01)
    assert all(share > 0.5 for share in found.informed.values())


def test_noise_of_two_percent_moves_the_values_by_little():
    random = np.random.default_rng(0)
    noisy = [m * math.exp(0.02 * random.standard_normal()) for m in MEASURED]
    found = fit(predict, noisy, PARAMETERS)
    for name, value in TRUE.items():
        assert found.values[name] == pytest.approx(value, rel=0.15)


def test_a_linear_problem_has_the_answer_of_ridge_regression():
    """t_i = exp(b_i) / Π θ_p^a_ip is linear in ln θ, so the minimum is that of a ridge regression, solved here at once."""
    a = np.array([[0.7, 0.2, 0.1], [0.6, 0.1, 0.3]])
    measured = [1.5, 1.2]

    def power_law(row, values):
        return math.prod(values[name] ** -a[row, k] for k, name in enumerate(TRUE))

    free = tuple(FitParameter(p.name, p.start, p.sigma, upper=100.0, lower=0.001) for p in PARAMETERS)
    found = fit(power_law, measured, free, row_sigma=0.1)
    start, sigma = np.log([p.start for p in free]), np.array([p.sigma for p in free])
    design = np.vstack([-a / 0.1, np.diag(1 / sigma)])
    target = np.concatenate([np.log(measured) / 0.1, start / sigma])
    expected = np.linalg.lstsq(design, target, rcond=None)[0]
    assert [math.log(found.values[p.name]) for p in free] == pytest.approx(expected, abs=1e-4)
    after = np.sqrt(np.diag(np.linalg.inv(design.T @ design)))
    assert [found.informed[p.name] for p in free] == pytest.approx(1 - after / sigma, abs=1e-4)


def test_what_no_row_depends_on_stays_at_its_start():
    found = fit(lambda row, values: 2.0 / values["matmul"], [4.0, 4.0], PARAMETERS)
    assert found.values["matmul"] == pytest.approx(0.5, rel=0.01)
    assert found.values["memory"] == pytest.approx(0.9) and found.values["attention"] == pytest.approx(0.5)
    assert found.informed["memory"] == pytest.approx(0.0, abs=1e-6)


def test_an_efficiency_never_exceeds_its_bound():
    found = fit(lambda row, values: 1.0 / values["matmul"], [0.5], PARAMETERS[:1])  # needs an efficiency of 2
    assert found.values["matmul"] == 1.0
    found = fit(lambda row, values: 1.0 / values["matmul"], [1e4], PARAMETERS[:1], row_sigma=1e-4)
    assert found.values["matmul"] == PARAMETERS[0].lower


def test_leave_one_out_predicts_each_row_by_a_fit_on_the_others():
    predicted = leave_one_out(predict, MEASURED, PARAMETERS)
    for row, seconds in enumerate(predicted):
        others = [i for i in range(len(MEASURED)) if i != row]
        assert seconds == predict(row, fit(predict, MEASURED, PARAMETERS, others).values)


def test_leave_one_out_of_two_constants():
    """With one weight and no prior to speak of, each row is predicted as the other one was measured."""
    loose = (FitParameter("scale", 0.5, 1e3, lower=1e-6),)
    assert leave_one_out(lambda row, values: 1 / values["scale"], [2.0, 4.0], loose) == pytest.approx((4.0, 2.0), rel=1e-3)
    assert leave_one_out(predict, MEASURED[:1], PARAMETERS) == ()


def test_an_outlier_shows_in_its_leave_one_out_error():
    measured = [*MEASURED[:3], MEASURED[3] * 1.5, *MEASURED[4:]]
    left_out = relative_error(leave_one_out(predict, measured, PARAMETERS)[3], measured[3])
    fitted = relative_error(fit(predict, measured, PARAMETERS).predicted_s[3], measured[3])
    assert left_out == pytest.approx(1 / 1.5 - 1, abs=0.01)
    assert abs(fitted) < 0.75 * abs(left_out)  # the fit that has seen it bends towards it


@pytest.mark.parametrize("measured", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(measured):
    with pytest.raises(BadInput, match="measured step time must be positive") as caught:
        fit(predict, [1.0, measured], PARAMETERS)
    assert caught.value.where == "row 1"


def test_nothing_to_fit_is_refused():
    with pytest.raises(BadInput, match="nothing to fit"):
        fit(predict, [], PARAMETERS)
    with pytest.raises(BadInput, match="nothing to fit"):
        fit(predict, MEASURED, ())


def test_a_start_out_of_bounds_is_refused():
    with pytest.raises(BadInput, match="not within"):
        FitParameter("matmul", 1.5, 0.1)
