"""Sizes as polynomials: one model traced at a few sizes of its inputs, with every number interpolated exactly.

A size (bytes of a value, FLOPs of a call) is a polynomial with rational coefficients in the sizes of the inputs: of
degree 1 in the batch and 2 in a length (attention). `Interpolation.of` finds it from its values at sample points and
checks it at points that it was not made from:

- c · Π xₖ^eₖ, the usual case, has one coefficient, which the base point gives; all other points must agree;
- else the points that form a lattice give all coefficients, one each (Lagrange), and the rest must agree.

`first_points` are for the former; where one size is no such product (tokens shifted by one: s - 1), `lattice_points`
have to be traced too.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import prod

import sympy

from passes.cost_model.formulas.polynomial_terms import Polynomial, Powers, polynomial, product, value
from passes.graph.placement_graph import PlacementGraph

Point = tuple[int, ...]

LINEAR = "batch"
"""The symbol in which all sizes are linear at most."""
_EXACT = 2**53  # floats beyond are rounded, and FLOPs are floats
_ROUNDING = Fraction(1, 10**12)
_HIGHEST = 4  # power of a length in a single product: attention over the patches of a picture


class NotPolynomial(Exception):
    """A size is no polynomial of the expected degree, or more points are needed to decide."""


def goes_down(size: int) -> bool:
    """True if a half, a quarter and three quarters of a length are integers of at least 2."""
    return size % 4 == 0 and size >= 8


def _levels(size: int, up: bool) -> Point:
    """Three other values of a length, whose ratios to it say its power. Smaller ones where the length has them: a table
    of positions may not reach beyond it."""
    return (size * 2, size * 4, size * 3) if up else (size // 2, size // 4, 3 * size // 4)


def first_points(names: Sequence[str], base: Point, up: bool) -> tuple[Point, ...]:
    """The base and two points at which every size differs, so that no two products of powers have the same ratios."""
    lengths = [name for name in names if name != LINEAR]

    def level(name: str, size: int, which: int) -> int:
        return _levels(size, up)[(which + 2 * lengths.index(name)) % 3]

    others = (
        tuple(n * rows if name == LINEAR else level(name, n, which) for name, n in zip(names, base))
        for which, rows in ((0, 3), (2, 5))
    )
    return (base, *others)


def lattice_points(names: Sequence[str], base: Point, up: bool) -> tuple[Point, ...]:
    """Points that determine any polynomial of the highest degrees: the grid below its degrees."""
    levels = [(n, 3 * n) if name == LINEAR else (n, *_levels(n, up)[:2]) for name, n in zip(names, base)]
    return tuple(tuple(level[g] for level, g in zip(levels, powers)) for powers in _grid(names))


def _grid(names: Sequence[str]) -> list[Powers]:
    """Powers up to 1 of the batch, up to 2 of all lengths together."""
    lengths = [k for k, name in enumerate(names) if name != LINEAR]
    grid = itertools.product(*(range(2 if name == LINEAR else 3) for name in names))
    return [powers for powers in grid if sum(powers[k] for k in lengths) <= 2]


class Interpolation:
    """Polynomials from values at `points`, the base first; `up`: how the points were made."""

    def __init__(self, names: Sequence[str], points: Sequence[Point], up: bool):
        self.names, self.points, self.up = tuple(names), tuple(points), up
        self._known: dict[tuple[int, ...], Polynomial] = {}

    def of(self, values: tuple[int, ...]) -> Polynomial:
        """The polynomial with these values. Raises NotPolynomial."""
        if values not in self._known:
            found = self._product(values)
            self._known[values] = self._sum(values) if found is None else found
        return self._known[values]

    @cached_property
    def _candidates(self) -> list[Powers]:
        highest = [1 if name == LINEAR else _HIGHEST for name in self.names]
        return sorted(itertools.product(*(range(h + 1) for h in highest)), key=lambda powers: (sum(powers), powers))

    def _product(self, values: tuple[int, ...]) -> Polynomial | None:
        """c · Π xₖ^eₖ through all values, or None."""
        for powers in self._candidates:
            found = polynomial([(powers, Fraction(values[0], product(powers, self.points[0])))])
            if self._agrees(found, values):
                return found
        return None

    def _agrees(self, found: Polynomial, values: tuple[int, ...]) -> bool:
        return all(_equal(value(found, point), n) for point, n in zip(self.points, values))

    @cached_property
    def _inverse(self) -> tuple[list[int], list[list[Fraction]]] | None:
        """Positions of the lattice points, and the matrix from values there to coefficients."""
        lattice = lattice_points(self.names, self.points[0], self.up)
        if not set(lattice) < set(self.points):
            return None
        powers = _grid(self.names)
        matrix = sympy.Matrix([[product(p, point) for p in powers] for point in lattice]).inv()
        rows = [[Fraction(int(x.p), int(x.q)) for x in matrix.row(k)] for k in range(len(powers))]
        return [self.points.index(point) for point in lattice], rows

    def _sum(self, values: tuple[int, ...]) -> Polynomial:
        if self._inverse is None:
            raise NotPolynomial(f"{list(values)} at {list(self.points)} is no product of powers")
        positions, rows = self._inverse
        factors = [sum((a * values[k] for a, k in zip(row, positions)), Fraction(0)) for row in rows]
        found = polynomial(zip(_grid(self.names), factors))
        if not self._agrees(found, values):
            raise NotPolynomial(f"{list(values)} at {list(self.points)} is no polynomial of degree 2")
        return found


def _equal(found: Fraction, n: int) -> bool:
    return found == n or (abs(n) > _EXACT and abs(found - n) <= _ROUNDING * abs(n))


class SymbolicSizes:
    """Sizes of one graph, of which `samples` are the traces at the points of an interpolation. Its methods raise
    NotPolynomial."""

    def __init__(self, samples: Sequence[PlacementGraph], interpolation: Interpolation):
        self.samples, self.interpolation = samples, interpolation

    def bytes(self, v: int) -> Polynomial:
        """Whole bytes of value number `v`."""
        return self.interpolation.of(tuple(graph.values[v].bytes for graph in self.samples))

    def flops(self, operation: int) -> Polynomial:
        """FLOPs of the whole operation number `operation`."""
        return self.interpolation.of(tuple(round(graph.operations[operation].flops) for graph in self.samples))

    def factor(self, v: int, dim: int, factor: int) -> Polynomial:
        """A factor of a dim; the whole dim, if its factors differ at another point."""
        values = [graph.values[v] for graph in self.samples]
        alike = len({len(value.factors[dim]) for value in values}) == 1
        return self.interpolation.of(tuple(
            value.factors[dim][factor] if alike else value.spec.shape[dim] for value in values))

    def outer(self, v: int, placement: tuple[int, int]) -> Polynomial:
        """Elements before the shards of a split: 1 if they are contiguous in memory."""
        dim, factor = placement
        return self.interpolation.of(tuple(
            prod(graph.values[v].spec.shape[:dim]) * prod(graph.values[v].factors[dim][:factor]) for graph in self.samples))


def difference(base: PlacementGraph, other: PlacementGraph) -> str | None:
    """The first place where two traces of one model differ in calls or values; None if they are equal."""
    for mine, theirs in zip(base.operations, other.operations):
        if (mine.target, mine.inputs, mine.outputs, mine.phase, mine.block) != (
            theirs.target, theirs.inputs, theirs.outputs, theirs.phase, theirs.block
        ):
            return f"{mine.name} ({mine.target}) is {theirs.name} ({theirs.target})"
    if len(base.operations) != len(other.operations):
        return f"{len(base.operations)} calls are {len(other.operations)}"
    for mine, theirs in zip(base.values, other.values, strict=True):
        if (mine.kind, mine.spec.dtype, len(mine.spec.shape)) != (theirs.kind, theirs.spec.dtype, len(theirs.spec.shape)):
            return f"{mine.name} is {theirs.spec.dtype} with {len(theirs.spec.shape)} dims"
    return None if base.outputs == other.outputs else "the results are others"
