"""Readable messages for pydantic validation errors: the place in the data, the expected type and the given value."""
from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from passes.errors import shortened

_KINDS = {
    "int": "an integer", "float": "a number", "string": "a string", "bool": "true or false", "dict": "an object",
    "mapping": "an object", "model": "an object", "model_attributes": "an object", "dataclass": "an object", "list": "an array",
    "tuple": "an array", "set": "an array", "frozen_set": "an array", "none_required": "null", "bytes": "bytes",
}
"""Expected types by the prefix of pydantic's error type: `int_type`, `int_parsing`, `int_from_float` and the like."""
_BOUNDS = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "of at least"), "less_than": ("lt", "below"),
           "less_than_equal": ("le", "of at most"), "multiple_of": ("multiple_of", "that is a multiple of")}


def describe_errors(error: ValidationError, most: int = 3) -> str:
    """The first `most` errors as one line."""
    lines: dict[tuple[Any, ...], list[str]] = {}
    for each in error.errors(include_url=False):
        lines.setdefault(_place(each["loc"]), []).append(_said(each))
    inner = {place[:-1] for place in lines if place}  # in a union, errors inside the intended type win
    lines = {place: said for place, said in lines.items() if place not in inner or not said[0].startswith("expected a string")}
    told = [": ".join(filter(None, (_name(place), _either(said)))) for place, said in lines.items()]
    more = f"; and {len(told) - most} more" if len(told) > most else ""
    return "; ".join(told[:most]) + more


_TYPES = ("str", "int", "float", "bool", "dict", "list", "tuple", "set", "frozenset", "none", "Plan", "MixedPlan")


def _place(loc: Sequence[Any]) -> tuple[Any, ...]:
    """The location of an error without the names of union members, which pydantic adds for each type that it tried."""
    return tuple(each for each in loc if isinstance(each, int) or not (each in _TYPES or "[" in each or "(" in each))


def _name(place: Sequence[Any]) -> str:
    """The path of a place, such as `mesh` or `rows[2].seconds`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")


def _either(said: Sequence[str]) -> str:
    """Merge the errors of a union's types: all accepted types, with the given value."""
    wanted = [each.removeprefix("expected ").partition(", got ") for each in said if each.startswith("expected ")]
    if len(said) > 1 and len(wanted) == len(said):
        return f"expected {' or '.join(dict.fromkeys(want for want, *_ in wanted))}, got {wanted[0][2]}"
    return said[0]


def _said(error: Mapping[str, Any]) -> str:
    kind, given, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "missing":
        return "the key is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key"
    if kind == "finite_number":
        return f"expected a finite number, got {_shown(given)}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}, got {_shown(given)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"expected a number {words} {_shown(context[name])}, got {_shown(given)}"
    if kind in ("too_short", "string_too_short", "too_long", "string_too_long"):
        least = context.get("min_length", context.get("max_length"))
        return f"expected {'at least' if 'short' in kind else 'at most'} {least} of them, got {_shown(given)}"
    for beginning, words in _KINDS.items():
        if kind == beginning or kind.startswith(f"{beginning}_") and kind.rpartition("_")[2] in (
                "type", "parsing", "float", "size", "required", "attributes"):
            return f"expected {words}, got {_shown(given)}"
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text if kind in ("value_error", "assertion_error") else f"{text[:1].lower()}{text[1:]}, got {_shown(given)}"


def _shown(value: Any) -> str:
    """A value as a user writes it; containers by kind."""
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, list | tuple | set | frozenset):
        return "an array" if value else "an empty array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else shortened(repr(value))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""
