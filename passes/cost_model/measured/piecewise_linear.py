"""α-β, piecewise in size: a continuous, nondecreasing, piecewise linear function through measured times.

With knots 0 = k0 < k1 < … < kp (kp the largest size) and the increments d0 = f(0) = α and dj = f(kj) - f(kj-1),

    f(x) = d0 + Σj dj · clip((x - kj-1) / (kj - kj-1), 0, 1)

is linear in the d, and nondecreasing where all d ≥ 0. Given knots, d minimizes the sum of squares of relative errors
Σi (f(xi) / yi - 1)², exactly. Interior knots are measured sizes; of all choices of p - 1 of them the one with the least
error is taken. The number of pieces p, of at least 3 sizes each on average, has the least

    BIC3(p) = n · ln(mean square of the relative errors + 1%²) + 3p · ln n

for n times (Kim and Kim, "Consistent model selection in segmented line regression", 2016: a knot counts for more than
the two parameters that it has, since it was searched for); no measurement is more exact than 1%. Leave-one-out,
with the choice of knots and p repeated, says how well it does.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

MOST_PIECES = 4
SIZES_PER_PIECE = 3  # fewer, and the curve would follow the noise
_MOST_CANDIDATES = 16  # interior knots that are tried: their combinations are all fitted
_EXACTNESS = 0.01  # relative


@dataclass(frozen=True)
class PiecewiseLinear:
    """Time in µs of a size in bytes: straight between knots, and as steep as the last piece beyond the last knot.

    knots: bytes, ascending, the first 0; values: µs at the knots.
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.knots) < 2 or len(self.knots) != len(self.values) or self.knots[0] != 0:
            raise ValueError("need as many values as knots, at least 2, and the first knot at 0")
        if any(a >= b for a, b in zip(self.knots, self.knots[1:])):
            raise ValueError(f"knots must ascend: {self.knots}")

    def __call__(self, nbytes: float) -> float:
        at = min(bisect_right(self.knots, nbytes), len(self.knots) - 1)
        left, low = self.knots[at - 1], self.values[at - 1]
        return low + (nbytes - left) * (self.values[at] - low) / (self.knots[at] - left)

    @property
    def pieces(self) -> int:
        return len(self.knots) - 1

    @property
    def alpha_us(self) -> float:
        """The time of an empty message."""
        return self.values[0]

    @property
    def beta_us_per_byte(self) -> float:
        """Time of one more byte at the largest sizes."""
        return (self.values[-1] - self.values[-2]) / (self.knots[-1] - self.knots[-2])


def fit_piecewise(nbytes: Sequence[float], us: Sequence[float], most_pieces: int = MOST_PIECES) -> PiecewiseLinear:
    """Fits times (µs, above 0) of sizes (bytes, above 0); a size may occur more than once.

    Raises ValueError with fewer than 2 different sizes.
    """
    x, y = np.asarray(nbytes, float), np.asarray(us, float)
    if x.shape != y.shape or x.ndim != 1 or not (np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)).all():
        raise ValueError("need as many times as sizes, all finite and above 0")
    sizes = len(np.unique(x))
    if sizes < 2:
        raise ValueError("need at least 2 different sizes")
    most = max(1, min(most_pieces, sizes // SIZES_PER_PIECE))
    fits = [_best(x, y, pieces) for pieces in range(1, most + 1)]
    return min(fits, key=lambda fit: _bic3(fit, nbytes, us))


def relative_errors(function: PiecewiseLinear, nbytes: Sequence[float], us: Sequence[float]) -> list[float]:
    """|f(x) - y| / y of each pair."""
    return [abs(function(x) - y) / y for x, y in zip(nbytes, us)]


def left_out_errors(nbytes: Sequence[float], us: Sequence[float], most_pieces: int = MOST_PIECES) -> list[float]:
    """Relative errors at each inner size, predicted by the fit without it; none with fewer than 4 sizes."""
    sizes = sorted(set(nbytes))
    errors: list[float] = []
    for size in sizes[1:-1] if len(sizes) > 3 else []:
        kept = [(x, y) for x, y in zip(nbytes, us) if x != size]
        out = [(x, y) for x, y in zip(nbytes, us) if x == size]
        function = fit_piecewise([x for x, _ in kept], [y for _, y in kept], most_pieces)
        errors += relative_errors(function, [x for x, _ in out], [y for _, y in out])
    return errors


def _bic3(fit: PiecewiseLinear, nbytes: Sequence[float], us: Sequence[float]) -> float:
    square = float(np.mean(np.square(relative_errors(fit, nbytes, us))))
    return len(nbytes) * math.log(square + _EXACTNESS**2) + 3 * fit.pieces * math.log(len(nbytes))


def _best(x: np.ndarray, y: np.ndarray, pieces: int) -> PiecewiseLinear:
    """The least squares of relative errors over all choices of `pieces - 1` interior knots."""
    sizes = np.unique(x)
    inner = sizes[1:-1]
    if len(inner) > _MOST_CANDIDATES:
        inner = inner[np.linspace(0, len(inner) - 1, _MOST_CANDIDATES).round().astype(int)]
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for chosen in combinations(inner, pieces - 1):
        knots = np.array([0.0, *chosen, sizes[-1]])
        rows = np.ones((len(x), pieces + 1))
        rows[:, 1:] = np.clip((x[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)
        square_error, increments = _nonnegative(rows / y[:, None])
        if best is None or square_error < best[0]:
            best = square_error, knots, increments
    assert best is not None, "no more pieces than there are inner sizes, plus one"
    _, knots, increments = best
    return PiecewiseLinear(tuple(knots.tolist()), tuple(np.cumsum(increments).tolist()))


def _nonnegative(rows: np.ndarray) -> tuple[float, np.ndarray]:
    """The d ≥ 0 with the least |rows @ d - 1|², and that minimum.

    Unknowns that come out below 0 are fixed at 0, the most negative first. Where the conditions of Karush, Kuhn and
    Tucker then say that another set of unknowns would do better, all sets are tried.
    """
    scale = np.linalg.norm(rows, axis=0)
    gram, right = (rows / scale).T @ (rows / scale), (rows / scale).sum(axis=0)
    some = list(range(rows.shape[1]))
    solution = _solve(gram, right, some)
    while (solution < 0).any():
        del some[int(np.argmin(solution[some]))]
        solution = _solve(gram, right, some)
    if (right - gram @ solution > 1e-9 * len(rows)).any():
        count = rows.shape[1]
        sets = [list(chosen) for size in range(1, count + 1) for chosen in combinations(range(count), size)]
        solutions = [solution for solution in (_solve(gram, right, chosen) for chosen in sets) if (solution >= 0).all()]
        solution = max(solutions, key=lambda solution: float(solution @ right))  # the error is len(rows) less this
    return float(len(rows) - solution @ right), solution / scale


def _solve(gram: np.ndarray, right: np.ndarray, some: list[int]) -> np.ndarray:
    """The solution of the least squares in the unknowns of `some`; the others are 0."""
    solution = np.zeros(len(right))
    solution[some] = np.linalg.solve(gram[np.ix_(some, some)], right[some])
    return solution
