"""Warn when Dynamo reaches its recompile limit for a function: from then on every rank runs it in full, without a plan."""
from __future__ import annotations

import functools
import logging

from passes import compat
from passes.session_state import state_of

log = logging.getLogger("hpml")


class _CompiledFunctions(set[str]):
    """Functions that this backend has compiled, by Dynamo's names."""


def note_function() -> None:
    """Note the function that Dynamo is compiling, to warn if Dynamo stops compiling it later."""
    state_of(_CompiledFunctions).add(compat.function_being_compiled())
    _listen()


@functools.cache
def _listen() -> None:
    compat.on_recompile_limit(_given_up)


def _given_up(limit: str, count: int, function: str, difference: str) -> None:
    compiled = state_of(_CompiledFunctions)
    if function in compiled:
        compiled.discard(function)  # once
        log.warning(
            "the function %s reached Dynamo's recompile limit after %d compilations and runs uncompiled from now on: every "
            "rank runs all of it, without sharding.\n"
            "  failed guard: %s\n"
            "  next step: keep the guarded value constant, or pass it as a tensor; or raise torch._dynamo.config.%s",
            function, count, difference.splitlines()[0].split("  # ")[0].strip(), limit)
