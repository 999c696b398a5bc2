"""Convert quantities and cost terms to sympy expressions, with the same pricing code as for numbers
(`passes.cost_model.cost_terms.price`)."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from passes.cost_model.cost_terms import Slice, Term, Update, price, sized
from passes.cost_model.formulas.symbolic_costs import SYMBOLS, SymbolicCosts
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.sharding.search.symbolic_terms import Quantity

_MANY, _ROUNDING = 2.0**20, 1e-9


def quantity_expression(quantity: Quantity, inputs: Sequence[sympy.Symbol], axes: Sequence[sympy.Symbol]) -> sympy.Expr:
    """A quantity as a sum of products of powers of `inputs`, each divided by the axes that shard it."""
    return sympy.Add(*(
        sympy.Mul(sympy.Rational(factor.numerator, factor.denominator), *map(sympy.Pow, inputs, powers))
        / sympy.Mul(*(axes[k] for k in over)) for (over, powers), factor in quantity
    ))


class SymbolicPrices:
    """`passes.cost_model.cost_terms.Prices` for expressions. numbers: numeric prices of the same mesh."""

    algebra, keyed = SYMBOLS, False

    def __init__(self, costs: SymbolicCosts, numbers: MeshPrices):
        self.costs, self.numbers = costs, numbers

    def kernel(self, flops: sympy.Expr, nbytes: sympy.Expr, dtype: str, kind: str, key: str = "") -> sympy.Expr:
        return self.costs.compute_us(sympy.sympify(flops), sympy.sympify(nbytes), dtype, kind)

    def collective(self, kind: str, axis: int, nbytes: sympy.Expr) -> sympy.Expr:
        return self.costs.collective_us(kind, axis, sympy.sympify(nbytes))

    def update(self, elements: sympy.Expr, dtype: str) -> sympy.Expr:
        """Time of an update as a linear function of the elements."""
        one, two = (self.numbers.update(n, dtype) for n in (_MANY, 2 * _MANY))
        fixed = 2 * one - two
        return (fixed if fixed > _ROUNDING * one else 0.0) + (two - one) / _MANY * elements


class TermExpressions:
    """Cached expressions in `inputs` and `axes`. now: quantities at the base sizes if prices are measured; expressions are
    then scaled to the measured prices at these sizes."""

    def __init__(self, inputs: tuple[sympy.Symbol, ...], axes: tuple[sympy.Symbol, ...], costs: SymbolicCosts,
                 numbers: MeshPrices, now: Mapping[Quantity, float] | None):
        self.inputs, self.axes, self.numbers, self.now = inputs, axes, numbers, now
        self.prices = SymbolicPrices(costs, numbers)
        self._quantities: dict[Quantity, sympy.Expr] = {}
        self._terms: dict[Term[Quantity], sympy.Expr] = {}

    def quantity(self, quantity: Quantity) -> sympy.Expr:
        """Expression of a quantity: bytes, FLOPs or elements."""
        if quantity not in self._quantities:
            self._quantities[quantity] = quantity_expression(quantity, self.inputs, self.axes)
        return self._quantities[quantity]

    def term(self, term: Term[Quantity]) -> sympy.Expr:
        """Expression of a term's time in µs."""
        if term not in self._terms:
            found = sympy.sympify(price(sized(term, self.quantity), self.prices))
            if self.now is not None and not isinstance(term, (Slice, Update)):
                found = self.prices.costs.scaled(found, price(sized(term, self.now.__getitem__), self.numbers))
            self._terms[term] = found
        return self._terms[term]
