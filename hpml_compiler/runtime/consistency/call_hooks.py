"""Wrappers of compiled calls: update this rank's status, compare inputs across ranks, name lost ranks in errors."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpml_compiler.runtime.consistency.input_check import InputCheck
from hpml_compiler.runtime.watchdog.barrier_check import (
    CALLING,
    EVERY_CALLS,
    all_failed_or_none,
    note_failure,
    require_all_ranks,
)
from hpml_compiler.runtime.watchdog.heartbeat import name_lost_rank, neighbor_is_there
from hpml_compiler.runtime.watchdog.rank_status import Location, RankStatus
from passes import compat
from passes.session_state import state_of

FIRST_TIMES = 4
"""So often, all ranks wait for each other before a graph without backward that follows another one."""


def forward_call(call: Callable[..., Any], spot: Location, half: InputCheck | None, training: bool = True) -> Callable[...,
                                                                                                                       Any]:
    """Wrap a call of several arguments. If it fails because another rank is late or gone, the error names that rank.

    training: False for a graph without backward, which one rank may call alone by mistake; that is checked if it comes
    after another graph: the first times, and later now and then, as a model whose parts are graphs comes there all the time.
    """

    def noted(*arguments: Any) -> Any:
        all_failed_or_none()
        neighbor_is_there()
        status = state_of(RankStatus)
        if not training and status.at is not spot and _is_checked(spot):
            require_all_ranks(f"calling the model ({spot.what})", CALLING, every=1)
        status.calls += 1
        spot.calls += 1
        status.at, status.inside = spot, True
        try:
            if half is not None:
                half.before(arguments)
            result = call(*arguments)
        except Exception as error:
            _raise(error)
        status.inside = False
        return result

    return noted


def _is_checked(spot: Location) -> bool:
    """The answer is the same on all ranks that do the same."""
    spot.entered += 1
    return spot.entered <= FIRST_TIMES or spot.entered % EVERY_CALLS == 0


def backward_call(call: Callable[[list[Any]], Any], spot: Location, half: InputCheck | None) -> Callable[[list[Any]], Any]:
    """Wrap a boxed call: one list of arguments, which it empties."""

    def noted(arguments: list[Any]) -> Any:
        all_failed_or_none()
        status = state_of(RankStatus)
        status.calls += 1
        spot.calls += 1
        status.at, status.inside = spot, True
        try:
            if half is not None:
                half.before(arguments)
            result = call(arguments)
        except Exception as error:
            _raise(error)
        status.inside = False
        return result

    return compat.mark_boxed(noted)


def _raise(error: Exception) -> Any:
    lost = name_lost_rank(error)  # before this rank leaves its location
    state_of(RankStatus).inside = False
    note_failure(lost)
    if lost is error:
        raise error
    raise lost from error
