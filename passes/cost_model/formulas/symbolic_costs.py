"""Costs as sympy expressions, in sizes and numbers of devices that are symbols.

    kernel      Max(ramp + flops · a + bytes · b, memory(bytes)) + launch           `passes.cost_model.efficiency_curves`
    collective  Min over algorithms of (fixed + bytes · per byte)                    `passes.cost_model.collective_costs`

with memory(bytes) a line, or a line for each level of caches. That is exact for a roofline; the expression for a measured
kernel is that of the roofline, `scaled` so that it equals the measurement at the base size.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from passes.cost_model.collective_costs import Ring, lines_of
from passes.cost_model.efficiency_curves import arithmetic, memory_segments
from passes.cost_model.roofline import RooflineCost
from passes.hardware.mesh import Mesh

_SAME = 1e-9
_BRANCHES = (sympy.Max, sympy.Min, sympy.Piecewise)


@dataclass(frozen=True)
class SymbolicAxis:
    """A mesh axis whose size is a symbol. levels: inside nodes and across them, for an axis that has both."""

    whole: Ring
    levels: tuple[Ring, ...]
    slowdown: dict[str, float]


def symbolic_axes(mesh: Mesh, symbols: Sequence[sympy.Symbol], devices_per_node: int) -> tuple[SymbolicAxis, ...]:
    """The axes of a mesh with symbols for their sizes, on links of the kind that they use now (`price_axis`)."""
    found = []
    for k, (axis, n) in enumerate(zip(mesh.axes, symbols)):
        if not axis.levels:
            ring = Ring(n, sympy.Float(axis.latency_us), sympy.Float(1e6 / axis.bandwidth_bytes_per_s))
            found.append(SymbolicAxis(ring, (), dict(axis.slowdown)))
            continue
        inner, outer = axis.levels
        members = sympy.Integer(devices_per_node) / sympy.Mul(*symbols[k + 1:])
        inside = Ring(members, sympy.Float(inner.latency_us), sympy.Float(1e6 / inner.bandwidth_bytes_per_s))
        across = Ring(n / members, sympy.Float(outer.latency_us), sympy.Float(1e6 / outer.bandwidth_bytes_per_s))
        hops = (across.size * across.alpha_us + (n - across.size) * inside.alpha_us) / n
        found.append(SymbolicAxis(Ring(n, hops, largest(inside.beta, across.beta / members)), (inside, across),
                                  dict(axis.slowdown)))
    return tuple(found)


def collective_expression(kind: str, axis: SymbolicAxis, nbytes: sympy.Expr) -> sympy.Expr:
    """µs of a collective, by the formulas of `passes.cost_model.collective_costs`."""
    slow = sympy.Float(axis.slowdown[kind]) if kind in axis.slowdown else sympy.Integer(1)
    return SYMBOLS.least([fixed + nbytes * per_byte for fixed, per_byte in
                          lines_of(kind, axis.whole, axis.levels, slow, SYMBOLS)])


def largest(first: sympy.Expr, second: sympy.Expr) -> sympy.Expr:
    """Max of two expressions in positive symbols; only one of them where it is never the smaller, term by term."""
    if not (first.has(*_BRANCHES) or second.has(*_BRANCHES)):
        terms = sympy.expand(first - second).as_coefficients_dict().values()
        if all(c >= 0 for c in terms):
            return first
        if all(c <= 0 for c in terms):
            return second
    return sympy.Max(first, second, evaluate=False)


class SympyAlgebra:
    """The algebra of sympy expressions (see `passes.cost_model.algebra`)."""

    def least(self, terms: Sequence[sympy.Expr]) -> sympy.Expr:
        return terms[0] if len(terms) == 1 else sympy.Min(*terms, evaluate=False)

    def largest(self, first: sympy.Expr, second: sympy.Expr) -> sympy.Expr:
        return largest(first, second)

    def steps(self, size: sympy.Expr) -> sympy.Expr:
        return sympy.ceiling(sympy.log(size, 2))

    def unless_one(self, size: sympy.Expr) -> sympy.Expr:
        return sympy.Min(1, size - 1)

    def below(self, amount: sympy.Expr, limit: float, then: Callable[[], sympy.Expr],
              otherwise: Callable[[], sympy.Expr]) -> sympy.Expr:
        return sympy.Piecewise((then(), amount < sympy.Float(limit)), (otherwise(), True))


SYMBOLS = SympyAlgebra()


@dataclass(frozen=True)
class SymbolicCosts:
    """Roofline costs on a mesh as expressions; `base` are the values of the symbols at the base size."""

    roofline: RooflineCost
    axes: tuple[SymbolicAxis, ...]
    base: dict[sympy.Symbol, int]

    def compute_us(self, flops: sympy.Expr, nbytes: sympy.Expr, dtype: str, kind: str) -> sympy.Expr:
        """One kernel."""
        if kind == "view":
            return sympy.Integer(0)
        us_per_flop, us_per_byte, ramp_us = arithmetic(self.roofline.device, kind, dtype)
        work = flops * _float(us_per_flop) + nbytes * _float(us_per_byte) + _float(ramp_us)
        return largest(work, self._memory_us(nbytes)) + _float(self.roofline.device.launch_latency_us)

    def _memory_us(self, nbytes: sympy.Expr) -> sympy.Expr:
        """A line in bytes for each level that may hold them; only levels that the bytes may reach."""
        lines = [(until, _float(fixed) + nbytes * _float(slope))
                 for until, fixed, slope in memory_segments(self.roofline.device)]
        if not nbytes.free_symbols:
            return next(line for until, line in lines if float(nbytes) <= until)
        if len(lines) == 1:
            return lines[0][1]
        return sympy.Piecewise(*((line, nbytes <= _float(until)) for until, line in lines[:-1]), (lines[-1][1], True),
                               evaluate=False)

    def collective_us(self, kind: str, axis: int, nbytes: sympy.Expr) -> sympy.Expr:
        """One collective, which is one more kernel where there is more than one device."""
        launch = _float(self.roofline.device.launch_latency_us) * sympy.Min(1, self.axes[axis].whole.size - 1)
        return collective_expression(kind, self.axes[axis], nbytes) + launch

    def scaled(self, expression: sympy.Expr, now_us: float) -> sympy.Expr:
        """The expression, multiplied so that it equals `now_us` at the base size."""
        arguments = list(self.base)
        found = float(sympy.lambdify(arguments, expression, "math")(*self.base.values()))
        if not found or abs(found - now_us) <= _SAME * abs(now_us):
            return expression
        return _float(now_us / found) * expression


def _float(number: float) -> sympy.Expr:
    return sympy.Integer(int(number)) if number in (0, 1) else sympy.Float(number)
