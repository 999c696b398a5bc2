"""Fingerprint of what users register, about operators and as passes, for cache keys.

A user's rule, formula or pass may be edited between two launches, or behave differently with the same source, through a
constant of its module or a closure. So the fingerprint covers the source of the module that defines it, and the plain data
(numbers, text, and containers of these) in its module, defaults and closure.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from passes import registry
from passes.op_rules import rule_table

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def extension_fingerprint_of() -> str:
    """Equal for two processes with the same external operators and passes; "" without any."""
    found: list[tuple[str, Any]] = [*registry.external_passes().items()]
    for name, operator in rule_table.external_operators().items():
        found += [(f"{name} {fact.name}", getattr(operator, fact.name)) for fact in dataclasses.fields(operator)]
    lines = [f"{name} {_described(each)}" for name, each in found]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def _described(what: Any) -> str:
    if isinstance(what, functools.partial):
        return f"{_described(what.func)} {what.args} {what.keywords}"
    return f"{source_of(what)} {[*_data_of(what)]}" if callable(what) else repr(what)


def source_of(definition: Callable[..., Any] | type) -> str:
    """Hash of the source of the defining module, or of the code if it was typed interactively."""
    module = sys.modules.get(definition.__module__)
    file = getattr(module, "__file__", None)
    if file is not None and Path(file).is_file():
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        code = getattr(definition, "__code__", None)
        return repr((definition.__module__, definition.__qualname__) if code is None else (code.co_code, code.co_consts))


def _data_of(definition: Callable[..., Any] | type) -> Iterator[tuple[str, str]]:
    module = sys.modules.get(definition.__module__)
    held = {name: value for name, value in vars(module).items() if not name.startswith("__")} if module is not None else {}
    function: Any = inspect.unwrap(definition)
    for number, cell in enumerate(getattr(function, "__closure__", None) or ()):
        held[f"closure {number}"] = cell.cell_contents
    held["defaults"] = getattr(function, "__defaults__", None)
    return ((name, repr(value)) for name, value in sorted(held.items()) if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return isinstance(value, _PLAIN)
