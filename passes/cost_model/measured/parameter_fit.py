"""Fit a few efficiencies to measured step times.

Let θ be the parameters (each in (0, 1]), t_i(θ) the predicted and m_i the measured seconds of row i. The fit minimizes

    Σ_i (ln t_i(θ) - ln m_i)² / σ²  +  Σ_p (ln θ_p - ln θ⁰_p)² / s_p²

over ln θ: errors are relative, and a parameter that the rows say little about stays near its start θ⁰, the built-in
value. In Bayes' words it is the most probable θ where measurements scatter by a relative σ and s_p is how well ln θ_p was
known before (ridge regression; Tikhonov 1963). So rows may be fewer than parameters; with many rows the second sum
fades. Solved by Gauss-Newton with Levenberg's and Marquardt's damping, each step clipped to the bounds and taken only if
it lowers the sum; derivatives are differences, since predictions are maxima of lines, with kinks.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passes.errors import BadInput
from passes.json_records import FrozenMap

Predict = Callable[[int, Mapping[str, float]], float]
"""(number of a row, value of each parameter) -> predicted seconds of a step."""

ROW_SIGMA = 0.02
"""Relative scatter of measured step times that the fit assumes."""

_STEP = 1e-3
_MOST_STEPS = 30
_SMALL = 1e-6


@dataclass(frozen=True)
class FitParameter:
    """A number to fit: its start, its bounds, and `sigma`: the prior standard deviation of its logarithm."""

    name: str
    start: float
    sigma: float
    lower: float = 0.02
    upper: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lower <= self.start <= self.upper:
            raise BadInput(f"the start {self.start} is not within [{self.lower}, {self.upper}]", f"parameter {self.name}",
                           "start between the bounds")
        if not 0 < self.sigma < math.inf:
            raise BadInput(f"sigma must be positive, got {self.sigma}", f"parameter {self.name}", "0.3 is usual")


@dataclass(frozen=True)
class ParameterFit:
    """The fitted values, and predicted seconds of each row with them.

    informed: for each parameter, from 0 (the rows do not determine it: its value is the start's) to 1 (the start no longer
    counts): 1 - (σ of ln θ_p after) / (σ before).
    """

    values: FrozenMap[str, float]
    predicted_s: tuple[float, ...]
    informed: FrozenMap[str, float]


def fit(predict: Predict, measured_s: Sequence[float], parameters: Sequence[FitParameter],
        rows: Sequence[int] | None = None, row_sigma: float = ROW_SIGMA) -> ParameterFit:
    """Fit `parameters` to the rows (all by default; `measured_s` has all of them).

    Raises BadInput for no rows, no parameters, and times, measured or predicted, that are not positive and finite.
    """
    rows = range(len(measured_s)) if rows is None else rows
    if not len(rows) or not parameters:
        raise BadInput("nothing to fit: there are no rows, or no parameters", "calibration",
                       "give a row that is not held out, and a parameter")
    measured = np.array([_log(measured_s[i], i, "measured") for i in rows])
    start = np.log([p.start for p in parameters])
    lower, upper = (np.log([getattr(p, side) for p in parameters]) for side in ("lower", "upper"))
    sigma = np.array([p.sigma for p in parameters])

    def values(z: np.ndarray) -> dict[str, float]:
        return {p.name: min(max(math.exp(x), p.lower), p.upper) for p, x in zip(parameters, z)}

    def logs(z: np.ndarray) -> np.ndarray:
        at = values(z)
        return np.array([_log(predict(i, at), i, "predicted") for i in rows])

    def residuals(z: np.ndarray) -> np.ndarray:
        return np.concatenate([(logs(z) - measured) / row_sigma, (z - start) / sigma])

    def slopes(z: np.ndarray, here: np.ndarray) -> np.ndarray:
        """Derivatives of the residuals, (rows + parameters, parameters); differences point into the bounds."""
        columns = []
        for p in range(len(z)):
            moved = z.copy()
            moved[p] += _STEP if z[p] + _STEP <= upper[p] else -_STEP
            columns.append((residuals(moved) - here) / (moved[p] - z[p]))
        return np.stack(columns, axis=1)

    z, damping = start.copy(), 1e-3
    here = residuals(z)
    for _ in range(_MOST_STEPS):
        jacobian = slopes(z, here)
        moved = there = None
        while damping < 1e9:
            moved = np.clip(z - _newton(jacobian, here, z, lower, upper, damping), lower, upper)
            there = residuals(moved)
            if there @ there < here @ here:
                break
            damping *= 10
        else:
            break
        assert moved is not None and there is not None
        small = np.abs(moved - z).max() < _SMALL or here @ here - there @ there < _SMALL * (here @ here)
        z, here, damping = moved, there, max(damping / 10, 1e-9)
        if small:
            break
    after = np.sqrt(np.diag(np.linalg.inv(_curvature(slopes(z, here)))))
    final = values(z)
    return ParameterFit(
        FrozenMap(final), tuple(predict(i, final) for i in rows),
        FrozenMap({p.name: float(max(0.0, 1 - s / p.sigma)) for p, s in zip(parameters, after)}),
    )


def leave_one_out(predict: Predict, measured_s: Sequence[float], parameters: Sequence[FitParameter],
                  row_sigma: float = ROW_SIGMA) -> tuple[float, ...]:
    """Predicted seconds of each row by a fit on all others; () for fewer than two rows."""
    count = len(measured_s)
    if count < 2:
        return ()
    return tuple(
        predict(i, fit(predict, measured_s, parameters, [j for j in range(count) if j != i], row_sigma).values)
        for i in range(count)
    )


def relative_error(predicted: float, measured: float) -> float:
    """(predicted - measured) / measured: positive where the prediction is too slow."""
    return (predicted - measured) / measured


def _curvature(jacobian: np.ndarray) -> np.ndarray:
    return jacobian.T @ jacobian


def _newton(jacobian: np.ndarray, here: np.ndarray, z: np.ndarray, lower: np.ndarray, upper: np.ndarray,
            damping: float) -> np.ndarray:
    """The damped step to be subtracted from z; parameters at a bound that they would leave stay."""
    gradient = jacobian.T @ here
    free = ~(((z <= lower) & (gradient > 0)) | ((z >= upper) & (gradient < 0)))
    step = np.zeros_like(z)
    if free.any():
        curvature = _curvature(jacobian[:, free])
        curvature += damping * np.diag(np.diag(curvature))
        step[free] = np.linalg.solve(curvature, gradient[free])
    return step


def _log(seconds: float, row: int, sort: str) -> float:
    if not 0 < seconds < math.inf:
        raise BadInput(f"the {sort} step time must be positive and finite, got {seconds}", f"row {row}", "mend that row")
    return math.log(seconds)
