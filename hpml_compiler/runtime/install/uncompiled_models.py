"""Report models without any Dynamo graph: every rank runs such a model in full. Importing this is cheap."""
from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from passes import compat
from passes.errors import BadInput
from passes.session_state import state_of

log = logging.getLogger("hpml")


@dataclass
class _GraphCount:
    """graphs: number of graphs that reached the backend. why: the reason for the last model that is not compiled."""

    graphs: int = 0
    why: str = ""


def report_at_first_step() -> None:
    """Report at an optimizer step if Dynamo made no graph. For functions and `module.compile()`, where the end of the first
    call is not observed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        register_optimizer_step_pre_hook(lambda *_: _report_once())  # stays: hooks cannot be removed while they run


def graph_came() -> None:
    """Count a graph; called by the backend."""
    state_of(_GraphCount).graphs += 1
    atexit.unregister(_at_exit)


def why_nothing_is_compiled() -> str:
    """The reason why Dynamo made no graph; empty where graphs reached the backend, or nothing was called yet."""
    count = state_of(_GraphCount)
    if count.graphs:
        return ""
    return count.why or (_said("the model", compat.graph_break_reasons()) if compat.dynamo_made_no_graph() else "")


def report_after_first_call(module: Any) -> None:
    """Report after a module's first call if Dynamo made no graph of it. module: the result of `torch.compile(module)`."""
    forward = module.forward

    @functools.wraps(forward)
    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside of another model that is compiled
            return forward(*args, **kwargs)
        graphs, reasons = state_of(_GraphCount).graphs, compat.graph_break_reasons()
        result = forward(*args, **kwargs)
        module.forward = forward
        new = compat.graph_break_reasons() - reasons
        if new and state_of(_GraphCount).graphs == graphs:
            _report(_said(type(module._orig_mod).__name__, new))
        return result

    module.forward = first


def refuse_without_values(module: Any) -> None:
    """Raise BadInput at a module's first call if a parameter is on the meta device, and what it is called with is not."""
    forward = module.forward

    @functools.wraps(forward)
    def first(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
        empty = next((name for name, x in module._orig_mod.named_parameters() if x.is_meta), None)
        if empty is not None and not any(x.is_meta for x in given) and not torch.compiler.is_compiling():
            raise BadInput(f"the model is on the meta device: {empty} has no values", type(module._orig_mod).__name__,
                           "call hpml_compiler.load or hpml_compiler.initialize first")
        module.forward = forward
        return forward(*args, **kwargs)

    module.forward = first


def _report(why: str) -> None:
    state_of(_GraphCount).why = why
    if int(os.environ.get("RANK", "0")) == 0:
        log.warning("%s", why)


def _said(what: str, reasons: Counter[str]) -> str:
    because = [*reasons][-1] if reasons else "Set TORCH_LOGS=graph_breaks to see why"
    return f"{what} is not compiled and runs in full on every rank, because Dynamo made no graph of it. {because}"


def _report_once() -> None:
    if not state_of(_GraphCount).why and (why := why_nothing_is_compiled()):
        _report(why)


@atexit.register
def _at_exit() -> None:
    """Report at exit, for scripts without an optimizer."""
    if not hasattr(sys, "last_value") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _report_once()
