"""`with activity("waiting for the plan"):` sets this rank's status, and names the lost rank if a collective fails inside."""
from __future__ import annotations

from typing import Any

from hpml_compiler.runtime.watchdog.heartbeat import name_lost_rank
from hpml_compiler.runtime.watchdog.rank_status import Location, RankStatus
from passes.session_state import state_of


class activity:  # noqa: N801  # reads as a statement
    """Context that sets this rank's location, and restores the one before."""

    def __init__(self, what: str) -> None:
        self.spot = Location(what)

    def __enter__(self) -> None:
        status = state_of(RankStatus)
        self.before = status.at, status.inside
        status.at, status.inside = self.spot, True

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, Exception):
            lost = name_lost_rank(error)
            if lost is not error:
                raise lost from error
        status = state_of(RankStatus)
        status.at, status.inside = self.before
