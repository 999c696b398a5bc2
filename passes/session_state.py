"""State that lasts as long as a session: what modules keep between calls, one object per class, released together.

The table in this module is the only mutable global of both packages. Hooks, operators of torch and threads need it, which take
no argument of ours and run in other contexts.
"""
from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class SessionState:
    """ended: sessions of this process that were closed; with it, names in a store are unique, such as those of heartbeats."""

    def __init__(self) -> None:
        self.ended = 0
        self._parts: dict[type, Any] = {}

    def of(self, kind: type[T]) -> T:
        """The session's object of this class, made by `kind()` when it is first asked for (0.1 us later on)."""
        try:
            return self._parts[kind]
        except KeyError:
            return self._parts.setdefault(kind, kind())

    def has(self, kind: type) -> bool:
        return kind in self._parts

    def put(self, part: Any) -> None:
        """Replace the session's object of this class. The one before is not closed."""
        self._parts[type(part)] = part

    def take(self, kind: type[T]) -> T | None:
        """Remove the session's object of this class and return it, not closed; None if there is none."""
        return self._parts.pop(kind, None)

    def reset(self) -> None:
        """Forget what is known of the models compiled so far: objects of classes with `is_of_models`."""
        self._parts = {kind: part for kind, part in self._parts.items() if not getattr(kind, "is_of_models", False)}

    def close(self) -> None:
        """Forget all objects, the latest first, after `close()` of those that have it. The next `of` starts a new session."""
        while self._parts:
            _, part = self._parts.popitem()
            if hasattr(part, "close"):
                part.close()
        self.ended += 1


state = SessionState()
state_of = state.of
