"""Serialized targets of a graph's nodes: torch's operators, arithmetic, and nothing else.

FX generates Python code of a graph with names inserted verbatim: so each name must be an identifier.
"""
from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes.compat import HigherOrderOperator, OpOverload
from passes.serialization.restricted_pickle import NotPlain

_FUNCTIONS: dict[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in (
        "getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "and_", "or_", "xor", "not_",
        "eq", "ne", "lt", "le", "gt", "ge")},
    **{f"builtins.{name}": getattr(builtins, name) for name in ("int", "float", "bool", "abs", "min", "max", "round")},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum", "sym_sqrt") if hasattr(torch, name)},
}
"""Functions that a graph may call besides torch's operators: arithmetic."""
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}
_OF_FILES = ("aten::from_file",)
"""Operators with effects other than computing: they are not loaded from a file."""


class CannotSerialize(Exception):
    """The graph has something that may mean something else in another process."""


@dataclass(frozen=True)
class SerializedOperator:
    """A torch operator, by its full name."""

    name: str


@dataclass(frozen=True)
class SerializedFunction:
    """One of `_FUNCTIONS`."""

    name: str


PARTS = (SerializedOperator, SerializedFunction)


def packed_target(node: Node) -> Any:
    """Data for `called`. Raises CannotSerialize."""
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return SerializedOperator(node.target.name())
    if isinstance(node.target, HigherOrderOperator):  # its callees may be in tables of this process
        raise CannotSerialize(f"a call of {node.target.name()}")
    if id(node.target) in _NAMES:
        return SerializedFunction(_NAMES[id(node.target)])
    raise CannotSerialize(f"a call of {node.target}")


def called(op: str, target: Any, constants: Container[str]) -> Any:
    """Target of a node. FX generates Python code of a graph with names inserted verbatim."""
    if isinstance(target, SerializedOperator) and op == "call_function":
        return _operator(target.name)
    if isinstance(target, SerializedFunction) and op == "call_function" and target.name in _FUNCTIONS:
        return _FUNCTIONS[target.name]
    if op == "output" or op == "placeholder" or (op == "get_attr" and isinstance(target, str) and target in constants):
        return own_name(target)
    raise NotPlain(f"{op} of {target!r}")


def _operator(full_name: str) -> OpOverload:
    namespace, _, name = full_name.partition("::")
    name, _, overload = name.partition(".")
    found: Any = torch.ops
    try:
        for part in (namespace, name, overload or "default"):
            found = getattr(found, part)  # creates nothing and calls nothing; the result is checked below
    except AttributeError as error:
        raise CannotSerialize(f"there is no operator {full_name} here") from error
    if not isinstance(found, OpOverload) or found.name().partition(".")[0] in _OF_FILES:
        raise NotPlain(f"{full_name} is no operator that graphs are made of")
    return found


def own_name(name: Any) -> str:
    """The name, if it is an identifier. Raises NotPlain."""
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
        raise NotPlain(f"{name!r} as a name")
    return name
