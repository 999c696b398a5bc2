"""Dynamo's recompile limit, beyond which every rank runs a function in full, without a plan.

Blocks that are compiled one by one (`for block in model.blocks: block.compile(backend="hpml")`) share a function, and each is
compiled once, since its parameters are placed then: these compilations do not count. Others do, and reaching the limit is said.
"""
from __future__ import annotations

import functools
import logging
from weakref import WeakSet

from torch import nn

from passes import compat
from passes.session_state import state_of

log = logging.getLogger("hpml")


class _CompiledFunctions(set[str]):
    """Functions that this backend has compiled, by Dynamo's names. modules: by function, those it was compiled for. raised: by
    how much the limits are higher than before, for the function with the most of them."""

    def __init__(self) -> None:
        self.modules: dict[str, WeakSet[nn.Module]] = {}
        self.raised = 0

    def close(self) -> None:
        compat.raise_recompile_limit(-self.raised)


def note_function() -> None:
    """Note the function that Dynamo is compiling, and its module, to warn if Dynamo stops compiling it later."""
    compiled, function = state_of(_CompiledFunctions), compat.function_being_compiled()
    compiled.add(function)
    _listen()
    module = compat.module_being_compiled()
    if module is not None:
        modules = compiled.modules.setdefault(function, WeakSet())
        modules.add(module)
        if (more := len(modules) - 1 - compiled.raised) > 0:
            compat.raise_recompile_limit(more)
            compiled.raised += more


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
