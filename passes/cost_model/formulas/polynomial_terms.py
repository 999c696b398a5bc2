"""Polynomials in the sizes of a model's inputs, as data: equal ones are equal tuples."""
from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

Powers = tuple[int, ...]
"""Exponent of each symbol."""
Polynomial = tuple[tuple[Powers, Fraction], ...]
"""Nonzero coefficients, by ascending powers."""


def polynomial(terms: Iterable[tuple[Powers, Fraction]]) -> Polynomial:
    """The sum of terms."""
    sums: dict[Powers, Fraction] = {}
    for powers, factor in terms:
        sums[powers] = sums.get(powers, Fraction(0)) + factor
    return tuple(sorted((powers, factor) for powers, factor in sums.items() if factor))


def value(terms: Polynomial, at: tuple[int, ...]) -> Fraction:
    """Exact value at a point."""
    return sum((factor * product(powers, at) for powers, factor in terms), Fraction(0))


def product(powers: Powers, at: tuple[int, ...]) -> int:
    """The product of powers at a point."""
    result = 1
    for power, n in zip(powers, at):
        result *= n**power
    return result
