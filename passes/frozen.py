"""Check that annotation values are frozen: that nobody can change them once they are written.

Numbers, strings, types, functions, tuples, frozensets, `FrozenMap`s and frozen dataclasses of such are frozen. An object with
identity equality is rejected, since its contents are unknown. A class whose objects are only read after construction, and too
large to check each time (thousands of choices of a solver's problem), may declare

    frozen_by_contract = True
"""
from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import fx

from passes.json_records import FrozenMap

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
                    torch.memory_format, type, types.FunctionType, types.BuiltinFunctionType, type(Ellipsis)})
# Hashable, yet mutable, or tied to one copy of the graph.
_REFUSED = (torch.Tensor, torch.nn.Module, fx.Node, fx.Graph)


def changeable(value: object) -> str | None:
    """Description of the mutable part of `value`; None if there is none."""
    stack: list[object] = [(value,)]
    seen: set[int] = set()  # by id: `value` keeps all of these alive
    while stack:
        found = stack.pop()
        kind = type(found)
        held: Iterable[object] = ()
        if isinstance(found, (tuple, frozenset)):
            held = found
        elif isinstance(found, FrozenMap):
            held = (*found, *found.values())
        elif (fields := _fields(kind)) is not None:
            held = fields(found)
        elif (culprit := _culprit(kind)) is not None:
            return culprit
        if not _PLAIN.issuperset(map(type, held)):  # most hold numbers and strings alone: a graph has many
            for each in held:
                if type(each) not in _PLAIN and id(each) not in seen:
                    seen.add(id(each))
                    stack.append(each)
    return None


@functools.cache
def _fields(kind: type) -> Callable[[Any], tuple[object, ...]] | None:
    """Getter of the field values of a frozen dataclass; None for another class."""
    if getattr(kind, "frozen_by_contract", False):
        return lambda value: ()
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


@functools.cache
def _culprit(kind: type) -> str | None:
    if issubclass(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        return f"a {kind.__name__}, which is no frozen dataclass"
    if issubclass(kind, _REFUSED) or not issubclass(kind, Hashable):
        return f"a {kind.__name__}"
    if kind.__hash__ is object.__hash__:
        return f"a {kind.__name__}, which is equal only to itself"
    return None
