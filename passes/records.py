"""Frozen records (dataclasses of numbers, strings and other records) and their strict JSON."""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from passes.errors import BadInput

R = TypeVar("R")


class FrozenMap(dict[str, float]):
    """A mapping from names to numbers that can be hashed and not changed, so that records may hold it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMap, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a FrozenMap cannot be changed; make a new one")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse  # type: ignore


def to_json(value: Any) -> Any:
    """A record as plain JSON values: records and mappings become objects, tuples become arrays."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [to_json(v) for v in value]
    return value


def from_json(cls: type[R], data: Any, where: str) -> R:
    """The record of class `cls` that `to_json` wrote as `data`.

    Raises BadInput, naming `where`, on unknown or missing keys and on values of another type; nothing is converted,
    but that an integer may stand for a float.
    """
    if not isinstance(data, dict):
        raise BadInput(f"expected an object for {cls.__name__}, got {_kind(data)}", where)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    unknown = [k for k in data if k not in known]
    if unknown:
        raise BadInput(f"unknown key {unknown[0]!r} in {cls.__name__}", where, f"legal keys: {', '.join(known)}")
    missing = [
        n for n, f in known.items() if n not in data and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise BadInput(f"missing key {missing[0]!r} in {cls.__name__}", where, f"add it; keys: {', '.join(known)}")
    hints = get_type_hints(cls)
    return cls(**{k: _value(hints[k], v, f"{where}: {k}") for k, v in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, UnionType):  # of one type and None, which JSON writes as null
        if value is None:
            return None
        [hint] = [each for each in get_args(hint) if each is not NoneType]
    if is_dataclass(hint):
        return from_json(hint, value, where)  # type: ignore[arg-type]
    if hint is FrozenMap:
        if not isinstance(value, dict):
            raise BadInput(f"expected an object of numbers, got {_kind(value)}", where)
        return FrozenMap({k: _value(float, v, f"{where}: {k}") for k, v in value.items()})
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise BadInput(f"expected an array, got {_kind(value)}", where)
        return tuple(_value(get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise BadInput(f"expected {_NAMES.get(hint, hint)}, got {_kind(value)}", where)
    if hint is float and not math.isfinite(value):
        raise BadInput(f"expected a finite number, got {value}", where)
    return value


def read_json(path: str | Path) -> Any:
    """The JSON of a file; raises BadInput if it cannot be read or is not valid (NaN and repeated keys are not)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot read the file: {error.strerror}", str(path)) from error
    except UnicodeDecodeError as error:
        raise BadInput("the file is not UTF-8 text", str(path)) from error
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except ValueError as error:
        raise BadInput(f"not valid JSON: {error}", str(path)) from error


def write_json(data: Any, path: str | Path) -> None:
    """Writes JSON values, indented, with a newline at the end; raises ValueError on NaN and infinities."""
    Path(path).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if not isinstance(value, (dict, list)) else type(value).__name__


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result
