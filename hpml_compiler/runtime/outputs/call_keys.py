"""Keys and templates of calls of torch functions, for their record and their nodes in a graph."""
from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.dispatch_table import MEMORY, METADATA, WRITES_UNSEEN, in_place

READS = METADATA | MEMORY | WRITES_UNSEEN | frozenset((
    "numpy", "item", "tolist", "backward", "grad", "share_memory_", "is_shared", "as_subclass", "pin_memory", "map_", "apply_",
    "module_load", "reinforce", "stft", "istft", "to_dense", "to_sparse", "to_sparse_csr", "to_sparse_coo", "to_mkldnn"))
"""Functions that look at values, memory or autograd, or return what no compiled graph returns."""
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, name + "_" * (name in ("and", "or"))) for name in _BINARY},
    **{f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert",
                                                           "getitem")}, "__div__": operator.truediv}
REVERSED: dict[str, Callable[..., Any]] = {
    f"__r{name}__": _OPERATORS[f"__{name}__"] for name in (*_BINARY, "div")}
"""Operators whose operands come in the other order."""
_NAMES = {func: name for name in _OPERATORS if isinstance(func := getattr(torch.Tensor, name, None), FunctionType)}
"""Names of operators by their functions: that of `**` calls itself pow, as the method does."""
_MODULES = frozenset(("torch", "torch.nn.functional", "torch.functional", "torch._tensor", "torch.special", "torch.linalg"))
_CONSTANTS = frozenset((type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)))


class NotRecordable(Exception):
    """An argument that a compiled graph cannot take, or of which an equal one may mean something else."""


@dataclass(frozen=True)
class Ref:
    """A value of the record as an argument, by its number."""

    index: int



def target_of(func: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | str | None:
    """The target of an FX node for a torch function: a function, or a method's name; None if it cannot be recorded."""
    name = _NAMES.get(func) or getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if attribute in ("T", "mT") else None
    if name.startswith("__"):
        return _OPERATORS.get(name) or REVERSED.get(name)
    if name in READS or in_place(name) or name.startswith("_"):
        return None
    if isinstance(func, (MethodDescriptorType, WrapperDescriptorType)) or getattr(torch.Tensor, name, None) is func:
        return name if args and getattr(torch.Tensor, name, None) is func else None
    if isinstance(func, FunctionType):
        known = func.__module__ in _MODULES or func.__module__.startswith("torch.nn.functional")
        return func if known and getattr(sys.modules[func.__module__], name, None) is func else None
    return func if isinstance(func, (BuiltinFunctionType, BuiltinMethodType)) else None


def encode(value: Any, ref: Callable[[torch.Tensor], tuple[Hashable, Ref]]) -> tuple[Hashable, Any]:
    """(key, template) of an argument: equal keys mean the same call. ref: the key and number of a tensor. Raises
    NotRecordable."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return ref(value)
    if kind in _CONSTANTS:
        return (kind, value), value
    if kind is float:
        return (kind, repr(value)), value  # 0.0 and -0.0 are equal, and no NaN is
    if kind in (tuple, list, torch.Size):
        items = [encode(item, ref) for item in value]
        made = [item for _, item in items]
        return (kind, *[key for key, _ in items]), made if kind is list else tuple(made)
    if kind is dict:
        items = [encode(item, ref) for item in value.values()]
        return (kind, *value, *[key for key, _ in items]), dict(zip(value, [item for _, item in items], strict=True))
    if kind is slice:
        key, made = encode((value.start, value.stop, value.step), ref)
        return (kind, key), slice(*made)
    raise NotRecordable


def fill(template: Any, value: Callable[[int], Any]) -> Any:
    """The argument with a value in the place of each `Ref`."""
    if type(template) is Ref:
        return value(template.index)
    if type(template) in (tuple, list):
        return type(template)(fill(item, value) for item in template)
    if type(template) is dict:
        return {key: fill(item, value) for key, item in template.items()}
    if type(template) is slice:
        return slice(*[fill(item, value) for item in (template.start, template.stop, template.step)])
    return template


def refs_in(template: Any) -> list[Ref]:
    found: list[Ref] = []

    def note(index: int) -> None:
        found.append(Ref(index))

    fill(template, note)
    return found


def identity_of(func: Callable[..., Any]) -> Hashable:
    """A torch function as a key. Getters of attributes are made anew at each use."""
    return ("get", func.__self__.__name__) if getattr(func, "__name__", "") == "__get__" else func  # type: ignore[attr-defined]


def values_key(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor with the values that it has now. An optimizer changes the local part of a parameter, not its wrapper."""
    return id(tensor), (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version
