"""Operations that a cost formula needs besides plus and times, so that one formula serves numbers and symbols.

`NUMBERS` is for floats; `passes.cost_model.formulas.symbolic_costs.SYMBOLS` for sympy expressions, which stay undecided where a
size is a symbol.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Algebra(Protocol):
    def least(self, terms: Sequence[Any]) -> Any: ...

    def largest(self, first: Any, second: Any) -> Any: ...

    def steps(self, size: Any) -> Any:
        """⌈log2 size⌉."""
        ...

    def unless_one(self, size: Any) -> Any:
        """0 if a size, which is at least 1, is 1; else 1."""
        ...

    def below(self, amount: Any, limit: float, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """`then()` where the amount is below the limit, else `otherwise()`."""
        ...


class FloatAlgebra:
    """The algebra of plain numbers."""

    def least(self, terms: Sequence[float]) -> float:
        return min(terms)

    def largest(self, first: float, second: float) -> float:
        return max(first, second)

    def steps(self, size: int) -> int:
        return (size - 1).bit_length()

    def unless_one(self, size: float) -> int:
        return int(size != 1)

    def below(self, amount: float, limit: float, then: Callable[[], float], otherwise: Callable[[], float]) -> float:
        return then() if amount < limit else otherwise()


NUMBERS = FloatAlgebra()
