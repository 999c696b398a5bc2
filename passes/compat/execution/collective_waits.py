"""Observe where this process waits for collectives of compiled graphs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class TimedWait:
    """Stands for the function of an operator, with its hash, which is the operator's: tables find the operator as before."""

    def __init__(self, first: Callable[..., Any], begins: Callable[[], Any], ends: Callable[[Any], None]) -> None:
        self.first, self.begins, self.ends = first, begins, ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = self.begins()
        try:
            return self.first(*args, **kwargs)
        finally:
            self.ends(token)

    def __hash__(self) -> int:
        return hash(self.first)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self.first


def watch_waits(begins: Callable[[], Any], ends: Callable[[Any], None]) -> Callable[[], None] | None:
    """Call `begins()` before each wait for a collective that Python code makes, and `ends` with its result after it. Returns a
    function that ends this; None if torch does not let it.

    Graphs that run in Python, and the code that inductor writes around its kernels, call the operator through `OpOverload`.
    """
    overload: Any = torch.ops._c10d_functional.wait_tensor.default
    first = getattr(overload, "_op", None)
    if not callable(first):
        return None
    timed = TimedWait(first, begins, ends)

    def undo() -> None:
        if overload._op is timed:
            overload._op = first

    try:
        overload._op = timed
    except AttributeError:
        return None
    return undo
