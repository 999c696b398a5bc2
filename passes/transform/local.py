"""One call of an operator, as `localize` gets it: the local operands, and the sizes that the call has whole and here."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passes.rules.base import Rule


@dataclass(frozen=True)
class Local:
    """One call to be localized: `args`/`kwargs` hold the local operands; shapes are those of the results."""

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    whole: tuple[tuple[int, ...], ...]
    local: tuple[tuple[int, ...], ...]
    rule: Rule | None
    ranges: Mapping[int, tuple[int, int]]
    """Operand that holds indices -> (first index, number) of this rank's range, where the indexed dim is split."""
    ordered: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Dim of the first result whose positions count -> (first position, number) of this rank's range, where it is split."""
    strides: tuple[tuple[int, ...], ...] = ()
    """Of the whole operands; only what reads memory rather than dims needs them."""

    def ratio(self, dim: int) -> int:
        return self.whole[0][dim] // max(self.local[0][dim], 1)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)
