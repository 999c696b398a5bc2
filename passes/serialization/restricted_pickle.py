"""Pickles of plain data that cannot run code: loading accepts the classes of an allow list and nothing else.

The list is derived from the expected data: its classes, and those that their fields are declared to hold (`classes_of`).
Besides them there are few constructors: torch's constants and devices, placements, tensors as shapes and bytes. No name outside
the list is looked up.
"""
from __future__ import annotations

import dataclasses
import enum
import functools
import io
import pickle
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from passes import compat

OUR_PACKAGES = ("hpml_compiler", "passes")
Classes = Mapping[tuple[str, str], Any]
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class NotPlain(Exception):
    """A pickle contains something other than plain data of the expected classes."""


def classes_of(*roots: Any) -> Classes:
    """The allow list for objects of these classes, by module and name: including this project's frozen dataclasses, pydantic
    models, enumerations and containers among the types of their fields, recursively."""
    found: dict[tuple[str, str], Any] = {}
    rest = list(roots)
    while rest:
        each = rest.pop()
        rest.extend(typing.get_args(each))
        kind = typing.get_origin(each) or each
        if not isinstance(kind, type) or kind.__module__.split(".")[0] not in OUR_PACKAGES or _key(kind) in found:
            continue
        if kind in roots or _is_data(kind):
            found[_key(kind)] = kind
            rest.extend(_types_of_fields(kind))
    return {**_of_libraries(), **found}


@functools.cache
def _types_of_fields(kind: type) -> tuple[Any, ...]:
    return tuple(typing.get_type_hints(kind).values())


def dumps(what: Any) -> bytes:
    """Pickle plain data. Raises pickle.PicklingError, TypeError or AttributeError for anything else."""
    file = io.BytesIO()
    RestrictedPickler(file).dump(what)
    return file.getvalue()


def loads(packed: bytes, classes: Classes) -> Any:
    """Unpickle. Raises NotPlain for anything outside the list, and for bytes that are no pickle."""
    return RestrictedUnpickler(io.BytesIO(packed), classes).load()


class RestrictedPickler(pickle.Pickler):
    """Writes pickles that `RestrictedUnpickler` reads."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _CONSTANTS):
            return constant, (str(obj).removeprefix("torch."),)
        if isinstance(obj, enum.Enum):  # releases of Python pickle these differently
            return type(obj), (obj.value,)
        if type(obj) is torch.Tensor and obj.device.type == "meta":
            return meta_tensor, (tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad)
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided:
            values = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return cpu_tensor, (tuple(obj.shape), obj.stride(), obj.dtype, values.numpy().tobytes(), obj.requires_grad)
        return NotImplemented


class RestrictedUnpickler(pickle.Unpickler):
    """Reads data of the classes of an allow list."""

    def __init__(self, file: io.BytesIO, classes: Classes) -> None:
        super().__init__(file)
        self.classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.classes:
            raise NotPlain(f"{module}.{name} is none of the classes that are expected there")
        return self.classes[module, name]

    def load(self) -> Any:
        try:
            return super().load()
        except (NotPlain, MemoryError):
            raise
        except Exception as error:  # invalid pickles, or ones with other fields, can raise almost anything
            raise NotPlain(f"{type(error).__name__}: {error}") from error


def constant(name: str) -> Any:
    """torch.float32, torch.strided and the like, by name."""
    value = vars(torch).get(name)
    if not isinstance(value, _CONSTANTS):
        raise NotPlain(f"torch.{name} is no dtype, layout or memory format")
    return value


def meta_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta").requires_grad_(requires_grad)


def cpu_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, values: bytes,
               requires_grad: bool) -> torch.Tensor:
    """A tensor with these bytes as its values, row by row."""
    made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    if made.numel():
        made.copy_(torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape))
    return made.requires_grad_(requires_grad)


def _key(kind: Any) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_data(kind: type) -> bool:
    if dataclasses.is_dataclass(kind):
        return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined] # others do work, and have their reasons
    return hasattr(kind, "model_fields") or issubclass(kind, enum.Enum | dict | tuple | list)


def _of_libraries() -> dict[tuple[str, str], Any]:
    ours: Iterable[Callable[..., Any]] = (constant, meta_tensor, cpu_tensor)
    theirs = (torch.device, torch.Size, CheckpointPolicy, *compat.data_classes())
    builtin = {("builtins", kind.__name__): kind for kind in (int, set, frozenset, complex, range, slice)}
    return {_key(each): each for each in (*ours, *theirs)} | builtin | {("builtins", "Ellipsis"): ...}
