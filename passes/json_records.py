"""Frozen records (dataclasses of numbers, strings and other records) and their strict JSON."""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from passes.errors import BadInput, shortened
from passes.filesystem.text_files import read_text, write_file

R = TypeVar("R")
K = TypeVar("K")
V = TypeVar("V")


class FrozenMap(dict[K, V]):
    """An immutable mapping, hashable if its values are, for use in frozen values."""

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
        raise BadInput(f"expected an object for {cls.__name__}, got {_kind(data)}", where,
                       f"write an object with the keys {', '.join(f.name for f in fields(cls))}")  # type: ignore[arg-type]
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
    values = {k: _value(hints[k], v, f"{where}: {k}") for k, v in data.items()}
    try:
        return cls(**values)
    except BadInput as error:  # the record has its name but not the place where it was read
        raise BadInput(error.what, f"{where}: {error.where}", error.next_step) from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, UnionType):  # of one type and None, which JSON writes as null
        if value is None:
            return None
        [hint] = [each for each in get_args(hint) if each is not NoneType]
    if is_dataclass(hint):
        return from_json(hint, value, where)  # type: ignore[arg-type]
    if get_origin(hint) is FrozenMap:  # of numbers
        if not isinstance(value, dict):
            raise BadInput(f"expected an object of numbers, got {_kind(value)}", where, 'write {"float32": 1e12}')
        return FrozenMap({k: _value(float, v, f"{where}: {k}") for k, v in value.items()})
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise BadInput(f"expected an array, got {_kind(value)}", where, "write the values between [ and ]")
        return tuple(_value(get_args(hint)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise BadInput(f"expected {_NAMES.get(hint, hint)}, got {_kind(value)}", where, "mend that value in the file")
    if hint is float and not math.isfinite(value):
        raise BadInput(f"expected a finite number, got {value}", where, "mend that value in the file")
    return value


def read_json(path: str | Path) -> Any:
    """The JSON of a file; raises BadInput if it cannot be read or is not valid (see `parse_json`)."""
    return parse_json(read_text(path, "the file", "give a JSON file that is there and can be read"), str(path))


def parse_json(text: str, where: str, next_step: str = "mend the file, or make it again", what: str = "not valid JSON") -> Any:
    """Parse JSON; raises BadInput, naming `where`, if it is invalid. NaN and repeated keys are invalid, and so is
    text that nests deeper than Python can parse."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except RecursionError as error:
        raise BadInput(f"{what}: it nests too deep", where, next_step) from error
    except ValueError as error:
        raise BadInput(f"{what}: {error if text.strip() else 'it is empty'}", where, next_step) from error


def write_json(data: Any, path: str | Path) -> None:
    """Writes JSON values, indented, with a newline at the end. Raises ValueError on NaN and infinities, and BadInput
    where the file cannot be written."""
    write_file(path, json.dumps(data, indent=2, allow_nan=False) + "\n", "the JSON file")


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {shortened(repr(value))}" if not isinstance(value, (dict, list)) else type(value).__name__


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result
