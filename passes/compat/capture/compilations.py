"""The function that Dynamo is compiling, and how often it may be compiled."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._guards import CompileContext


def frame_being_compiled() -> str:
    """Number of the Python code that Dynamo is compiling, equal when it compiles that again; "" if none."""
    compile_id = CompileContext.current_compile_id()
    return "" if compile_id is None else str(compile_id.frame_id)


def function_being_compiled() -> str:
    """Dynamo's name of the function that it is compiling; call it inside a backend."""
    code = _root().f_code
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"


def module_being_compiled() -> torch.nn.Module | None:
    """The module whose method that is; call it inside a backend."""
    root = _root()
    found = root.f_locals.get(next(iter(root.f_code.co_varnames), ""))
    return found if isinstance(found, torch.nn.Module) else None


def _root() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.root_tx


def raise_recompile_limit(count: int) -> None:
    """Let Dynamo compile each function so many times more than its limits say; fewer times where the number is negative."""
    from torch._dynamo import config

    config.recompile_limit += count
    config.accumulated_recompile_limit += count


def on_recompile_limit(callback: Callable[[str, int, str, str], None]) -> None:
    """Call back whenever Dynamo hits a recompile limit: with the name of the limit in its config, the limit,
    the function, and the last failed guard. Dynamo only logs it, so a log handler is installed."""
    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told = record.args
            if str(record.msg).startswith("torch._dynamo hit config.") and isinstance(told, tuple) and len(told) >= 4:
                callback(str(told[0]), cast("int", told[1]), str(told[2]), str(told[3]))

    logging.getLogger("torch._dynamo.convert_frame").addHandler(Listener(logging.WARNING))
