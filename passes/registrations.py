"""Tables that users add to: rules of operators, passes. Like imports, which fill them once, they belong to the process."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Registrations(dict[str, T]):
    """Registered objects by name. derived: a cache of values computed from them, emptied by each change."""

    def __init__(self) -> None:
        super().__init__()
        self.derived: dict[Any, Any] = {}

    def __setitem__(self, name: str, value: T) -> None:
        super().__setitem__(name, value)
        self.derived.clear()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.derived.clear()

    def clear(self) -> None:
        super().clear()
        self.derived.clear()

    @contextlib.contextmanager
    def temporary(self) -> Iterator[None]:
        """Context whose registrations are undone at its end. Load all modules that register before it: none is loaded twice."""
        before = dict(self)
        try:
            yield
        finally:
            self.clear()
            self.update(before)
