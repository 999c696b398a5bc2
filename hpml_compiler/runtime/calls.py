"""Around each call of a compiled graph: what this rank does is noted, what it was given is compared across ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpml_compiler.runtime.compared import Comparison
from hpml_compiler.runtime.doing import Spot, doing
from hpml_compiler.runtime.lost_ranks import named, neighbor_is_there
from hpml_compiler.runtime.together import CALLING, all_failed_or_none, note_failure, together


def forward_call(call: Callable[..., Any], spot: Spot, half: Comparison | None, training: bool = True) -> Callable[..., Any]:
    """A call of several arguments. Where it fails because another rank is late or gone, the error names that rank.

    training: False for a graph without backward, which one rank may call alone by mistake; that is looked at when it comes
    after another graph.
    """

    def noted(*arguments: Any) -> Any:
        all_failed_or_none()
        neighbor_is_there()
        if not training and doing.at is not spot:
            together(f"calling the model ({spot.what})", CALLING, every=1)
        doing.calls += 1
        spot.calls += 1
        doing.at, doing.inside = spot, True
        try:
            if half is not None:
                half.before(arguments)
            result = call(*arguments)
        except Exception as error:
            _raise(error)
        doing.inside = False
        return result

    return noted


def backward_call(call: Callable[[list[Any]], Any], spot: Spot, half: Comparison | None) -> Callable[[list[Any]], Any]:
    """The same around a call of one list of arguments, which it empties."""

    def noted(arguments: list[Any]) -> Any:
        all_failed_or_none()
        doing.calls += 1
        spot.calls += 1
        doing.at, doing.inside = spot, True
        try:
            if half is not None:
                half.before(arguments)
            result = call(arguments)
        except Exception as error:
            _raise(error)
        doing.inside = False
        return result

    noted._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
    return noted


def _raise(error: Exception) -> Any:
    lost = named(error)  # while this rank still counts as inside
    doing.inside = False
    note_failure(lost)
    if lost is error:
        raise error
    raise lost from error
