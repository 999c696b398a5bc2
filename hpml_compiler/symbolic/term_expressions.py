"""Quantities and terms as sympy expressions."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from hpml_compiler.symbolic.term_prices import TermPrices
from passes.costs.symbolic import SymbolicCosts
from passes.partition.redistribution import SLICE_US
from passes.partition.terms import Kernel, Message, Quantity, Slice, Term, Update, whole


def quantity_expression(quantity: Quantity, inputs: Sequence[sympy.Symbol], axes: Sequence[sympy.Symbol]) -> sympy.Expr:
    """A sum of products of powers of `inputs`, each over its axes."""
    return sympy.Add(*(
        sympy.Mul(sympy.Rational(factor.numerator, factor.denominator), *map(sympy.Pow, inputs, powers))
        / sympy.Mul(*(axes[k] for k in over)) for (over, powers), factor in quantity
    ))


@dataclass(frozen=True)
class TermExpressions:
    """Expressions in `inputs` and `axes`, each made once. now: quantities at the base size, where prices were measured:
    then the expressions are scaled to what they are there."""

    inputs: tuple[sympy.Symbol, ...]
    axes: tuple[sympy.Symbol, ...]
    costs: SymbolicCosts
    prices: TermPrices
    now: Mapping[Quantity, float] | None
    _quantities: dict[Quantity, sympy.Expr] = field(default_factory=dict, init=False)
    _terms: dict[Term, sympy.Expr] = field(default_factory=dict, init=False)

    def quantity(self, quantity: Quantity) -> sympy.Expr:
        """Bytes, FLOPs or elements."""
        if quantity not in self._quantities:
            self._quantities[quantity] = quantity_expression(quantity, self.inputs, self.axes)
        return self._quantities[quantity]

    def term(self, term: Term) -> sympy.Expr:
        """µs of one term."""
        if term not in self._terms:
            self._terms[term] = self._term(term)
        return self._terms[term]

    def _term(self, term: Term) -> sympy.Expr:
        if isinstance(term, Slice):
            return sympy.Float(SLICE_US)
        if isinstance(term, Update):
            fixed, slope = self.prices.optimizer_line(term.dtype)
            return fixed + slope * self.quantity(term.elements)
        if isinstance(term, Kernel):
            found = self.costs.compute_us(
                self.quantity(term.flops), self.quantity(term.bytes), term.dtype, self.prices.kind(term.kind))
        else:
            found = self._message(term)
        return found if self.now is None else self.costs.scaled(found, self.prices.us(term, self.now))

    def _message(self, term: Message) -> sympy.Expr:
        nbytes, bucket = self.quantity(term.bytes), sympy.Float(term.bucket_bytes)
        alone = self.costs.collective_us(term.collective, term.axis, nbytes)
        for outer in term.outer:
            alone += self._copy(nbytes) * sympy.Min(1, self.quantity(whole(outer)) - 1)
        if not term.bucket_bytes:
            return alone
        together = self.costs.collective_us(term.collective, term.axis, bucket) + 2 * self._copy(bucket)
        return sympy.Piecewise((together * nbytes / bucket, nbytes < bucket), (alone, True))

    def _copy(self, nbytes: sympy.Expr) -> sympy.Expr:
        return self.costs.compute_us(sympy.Integer(0), nbytes, "float32", "pointwise")

