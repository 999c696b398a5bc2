"""Polynomials from values at a few points: the ones that made the values come back, others are refused."""
from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from passes.cost_model.formulas.polynomial_terms import polynomial, value
from passes.cost_model.formulas.symbolic_sizes import (
    Interpolation,
    NotPolynomial,
    SymbolicSizes,
    difference,
    first_points,
    goes_down,
    lattice_points,
)
from passes.graph.placement_graph import PlacementGraph
from tests.passes.graphs import Builder, V

NAMES, BASE = ("batch", "sequence"), (4, 16)


def interpolation(names=NAMES, base=BASE, up=False, lattice=False) -> Interpolation:
    points = first_points(names, base, up)
    more = [p for p in lattice_points(names, base, up) if p not in points] if lattice else []
    return Interpolation(names, (*points, *more), up)


def at(found: Interpolation, size) -> tuple[int, ...]:
    return tuple(size(*point) for point in found.points)


@pytest.mark.parametrize(("size", "powers", "factor"), [
    (lambda b, s: 768, (0, 0), 768), (lambda b, s: b * s * 12, (1, 1), 12), (lambda b, s: s * s, (0, 2), 1),
    (lambda b, s: b * s * s * 7, (1, 2), 7), (lambda b, s: b * s // 4, (1, 1), Fraction(1, 4)),
])
@pytest.mark.parametrize("up", [False, True])
def test_a_product_of_powers_takes_two_more_points(size, powers, factor, up):
    found = interpolation(up=up)
    assert found.of(at(found, size)) == ((powers, factor),)


@pytest.mark.parametrize("size", [
    lambda b, s: b * (s - 1) * 32, lambda b, s: b * s * s + 3 * s + 5, lambda b, s: 2 * b + s, lambda b, s: b * (s - 1) ** 2,
])
def test_a_sum_takes_the_lattice(size):
    few, all_of_them = interpolation(), interpolation(lattice=True)
    with pytest.raises(NotPolynomial):
        few.of(at(few, size))
    found = all_of_them.of(at(all_of_them, size))
    for point in ((1, 1), (7, 100), (64, 2048)):
        assert value(found, point) == size(*point)


@pytest.mark.parametrize("size", [
    lambda b, s: b**2 + s, lambda b, s: (s + 1) ** 3, lambda b, s: -(-b * s // 7), lambda b, s: 2**s,
])
def test_what_is_no_polynomial_of_that_degree_is_refused(size):
    found = interpolation(lattice=True)
    with pytest.raises(NotPolynomial):
        found.of(at(found, size))


def test_two_lengths():
    found = interpolation(("batch", "source", "target"), (4, 16, 32), lattice=True)
    for size in (lambda b, s, t: b * s * t, lambda b, s, t: b * t + s * s + 1):
        assert value(found.of(at(found, size)), (5, 7, 11)) == size(5, 7, 11)


def test_large_flops_may_be_rounded():
    found = interpolation()
    exact = at(found, lambda b, s: b * s * (10**16 + 1))
    assert found.of(tuple(round(float(n)) for n in exact))[0][0] == (1, 1)


@pytest.mark.parametrize(("size", "down"), [(16, True), (8, True), (12, True), (6, False), (4, False), (1, False)])
def test_lengths_are_halved_where_they_have_halves(size, down):
    assert goes_down(size) == down


def test_polynomials_are_canonical():
    assert polynomial([((1,), Fraction(2)), ((0,), Fraction(1)), ((1,), Fraction(-2))]) == (((0,), 1),)


def graph_of(rows: int, calls: int) -> PlacementGraph:
    builder = Builder()
    v = builder.input((rows, 8))
    for _ in range(calls):
        v = builder.call(torch.ops.aten.relu.default, V(v))
    return builder.finish([v])


def test_graphs_differ_where_a_call_does_and_not_where_a_size_does():
    assert difference(graph_of(4, 2), graph_of(6, 2)) is None
    assert difference(graph_of(4, 2), graph_of(4, 3)) == "2 calls are 3"


def test_sizes_of_a_graph():
    points = first_points(("batch",), (4,), True)
    sizes = SymbolicSizes([graph_of(rows, 1) for (rows,) in points], Interpolation(("batch",), points, True))
    assert sizes.bytes(0) == (((1,), 32),)
    assert sizes.factor(0, 0, 0) == (((1,), 1),) and sizes.factor(0, 1, 0) == (((0,), 8),)
    assert sizes.outer(0, (0, 0)) == (((0,), 1),) and sizes.outer(0, (1, 0)) == (((1,), 1),)
