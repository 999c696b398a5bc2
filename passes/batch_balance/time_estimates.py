"""Estimates of a group's step time by its rows, from few known points.

Planning a group for a number of rows takes seconds to minutes, so it is done for few numbers, and the rest is
estimated from below: then an answer all of whose entries are known is the best one (`search`).

A plan picks the cheapest of several strategies (compute everything everywhere; split the rows; ...), each of which
takes a fixed time and so much per row. The cheapest of lines is a concave function, which no chord lies above; so
between two known points the chord is a lower bound, below the first one the line from the origin, and above the last
one its own time.

Rows that the devices do not divide cost more. Numbers of rows are therefore sorted into classes by their greatest
common divisor with the number of devices. The chords go through the points of the class with the largest divisor seen;
another class costs more by the smallest factor that its known points prove (over the largest value of a concave function
through the points of the chords there), and one without points by none.

A bound has to be that optimistic; a good query need not. So there are careful tables too, in which the last chord is
extended, and of the rows between a feasible and an infeasible number, only the lower half counts as feasible: queries
then bisect the limit.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FINEST = 4096
"""Batch size up to which every number of rows is a candidate."""


@dataclass
class TimeEstimate:
    """Times of a group of `devices` for 1 to `total` rows."""

    devices: int
    total: int
    known: dict[int, float] = field(default_factory=dict)
    impossible: set[int] = field(default_factory=set)

    def learn(self, rows: int, time_us: float | None) -> None:
        """Record the time of `rows`; None if they do not fit. More rows with no better divisor do not fit either."""
        if time_us is None or math.isinf(time_us):
            self.impossible.add(rows)
        else:
            self.known[rows] = time_us

    def knows(self, rows: int) -> bool:
        return rows == 0 or rows in self.known or rows in self.impossible

    def divisor(self, rows: int) -> int:
        """The class of a number of rows."""
        return math.gcd(rows, self.devices)

    def known_table(self) -> np.ndarray:
        """µs for 0 to `total` rows where it is known, else inf; entry 0 is 0."""
        return self._with_known(np.full(self.total + 1, math.inf))

    def table(self, careful: bool = False) -> np.ndarray:
        """Lower bounds of µs for 0 to `total` rows, inf where infeasible; careful: estimates, inf where
        possibly infeasible. Entry 0 is 0."""
        table = np.full(self.total + 1, math.inf)
        if self.known:
            rows = _candidates(self.total)
            divisors = np.gcd(rows, self.devices)
            factors = {int(d): self._factor(int(d)) for d in np.unique(divisors)}
            table[rows] = self._chords(rows, careful) * np.array([factors[int(d)] for d in divisors])
            for miss in self.impossible:
                table[rows[(rows >= miss) & (self.divisor(miss) % divisors == 0)]] = math.inf
            if careful:
                table[self._likely_limit() + 1 :] = math.inf
        return self._with_known(table)

    def _with_known(self, table: np.ndarray) -> np.ndarray:
        for rows, time_us in self.known.items():
            table[rows] = time_us
        table[0] = 0.0
        return table

    def _likely_limit(self) -> int:
        fits = max(self.known)
        misses = [rows for rows in self.impossible if rows > fits]
        return self.total if not misses else max(fits + self.devices, (fits + min(misses)) // 2)

    def _points(self) -> list[tuple[int, float]]:
        """Points of the chords, in ascending order, the origin first."""
        best = max(self.divisor(rows) for rows in self.known)
        return [(0, 0.0), *sorted((rows, us) for rows, us in self.known.items() if self.divisor(rows) == best)]

    def _chords(self, rows: np.ndarray, careful: bool) -> np.ndarray:
        points = self._points()
        found = np.interp(rows, [x for x, _ in points], [y for _, y in points])  # above the last point: its time
        if careful:
            found = np.where(rows > points[-1][0], np.maximum(_line(points[-2], points[-1], rows), found), found)
        return found

    def _most(self, rows: int) -> float:
        """The largest value of a concave increasing function through the points: the neighboring chords, extended."""
        points = self._points()
        right = next((i for i, (x, _) in enumerate(points) if x >= rows), len(points))
        most = [points[right][1]] if right < len(points) else []
        if right >= 2:
            most.append(float(_line(points[right - 2], points[right - 1], rows)))
        if right + 1 < len(points):
            most.append(float(_line(points[right], points[right + 1], rows)))
        return min(most)

    def _factor(self, divisor: int) -> float:
        of_class = [rows for rows in self.known if self.divisor(rows) == divisor]
        return max(min((self.known[rows] / self._most(rows) for rows in of_class if self._most(rows) > 0), default=1.0), 1.0)


def _line(a: tuple[int, float], b: tuple[int, float], x: Any) -> Any:
    return a[1] + (x - a[0]) * (b[1] - a[1]) / (b[0] - a[0])


def _candidates(total: int) -> np.ndarray:
    """1 to `total`, or for a very large batch the multiples of a divisor, and the rest up to `total`."""
    rows = np.arange(1, total + 1)
    if total <= FINEST:
        return rows
    unit = next(u for u in range(-(-total // FINEST), total + 1) if total % u == 0 or u * u > total)
    return rows[(rows % unit == 0) | (rows % unit == total % unit)]
