"""`with at("waiting for the plan"):` says what this rank does in there, and names the rank that is gone if that fails."""
from __future__ import annotations

from typing import Any

from hpml_compiler.runtime.doing import Spot, doing
from hpml_compiler.runtime.lost_ranks import named


class at:  # noqa: N801  # reads as a statement
    """A context: inside, this rank is at a spot; after it, where it was before."""

    def __init__(self, what: str) -> None:
        self.spot = Spot(what)

    def __enter__(self) -> None:
        self.before = doing.at, doing.inside
        doing.at, doing.inside = self.spot, True

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, Exception):
            lost = named(error)
            if lost is not error:
                raise lost from error
        doing.at, doing.inside = self.before
