"""Tables that users add to: rules of operators, passes. Like imports, which fill them once, they belong to the process."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Registrations(dict[str, T]):
    """What is registered, by name."""

    @contextlib.contextmanager
    def temporary(self) -> Iterator[None]:
        """Context whose registrations are undone at its end. Load all modules that register before it: none is loaded twice."""
        before = dict(self)
        try:
            yield
        finally:
            self.clear()
            self.update(before)
