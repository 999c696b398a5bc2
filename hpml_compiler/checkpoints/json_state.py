"""State dicts as JSON, with tensors apart: what schedulers, loaders and scalers return, without pickle."""
from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from passes.errors import BadInput

MARK = "$"
"""Begins the key of an object that stands for a value JSON has no type for."""


class StateEncoder:
    """Encodes nests of dicts, lists, tuples, numbers, strings, bytes, arrays and tensors. tensors: those found, by path; with
    `inline` they are in the JSON, for small ones that differ by rank."""

    def __init__(self, inline: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._inline = inline

    def encode(self, value: Any, path: str) -> Any:
        """JSON of a value. path: its name. Raises BadInput for a value of another kind."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"$data": _data_of(value)} if self._inline else {"$tensor": self._note(value, path)}
        kind = next((kind for kind in _KINDS if isinstance(value, kind)), None)
        if kind is None or hasattr(value, "_fields"):
            raise BadInput(f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved without pickle", path,
                           "let state_dict() return numbers, strings, lists, dicts, arrays and tensors")
        return _KINDS[kind](self, value, path)

    def _note(self, value: torch.Tensor, path: str) -> str:
        name, count = path, 1
        while name in self.tensors:  # "a.b" of one dict, and "b" in "a" of another
            name, count = f"{path}~{count}", count + 1
        self.tensors[name] = value
        return name

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        join = "" if path.endswith("/") else "."
        if not isinstance(value, Counter) and all(type(key) is str and not key.startswith(MARK) for key in value):
            return {key: self.encode(item, f"{path}{join}{key}") for key, item in value.items()}
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        return {kind: [[self.encode(key, path), self.encode(item, f"{path}{join}{key}")] for key, item in value.items()]}

    def _sequence(self, value: Any, path: str) -> Any:
        join = "" if path.endswith("/") else "."
        return [self.encode(item, f"{path}{join}{k}") for k, item in enumerate(value)]

    def _deque(self, value: deque[Any], path: str) -> Any:
        return {"$deque": self._sequence(value, path), "maxlen": value.maxlen}

    def _array(self, value: np.ndarray | np.generic, path: str) -> Any:
        if value.dtype.hasobject:
            raise BadInput("a NumPy array of Python objects cannot be saved without pickle", path, "save numbers")
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": data, "dtype": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}


_KINDS: dict[type, Callable[[StateEncoder, Any, str], Any]] = {
    np.ndarray: StateEncoder._array, np.generic: StateEncoder._array,
    bool: lambda self, value, path: bool(value), int: lambda self, value, path: int(value),
    float: lambda self, value, path: self.encode(float(value), path), str: lambda self, value, path: str(value),
    Mapping: StateEncoder._mapping, list: StateEncoder._sequence, deque: StateEncoder._deque,
    tuple: lambda self, value, path: {"$tuple": self._sequence(value, path)},
    set: lambda self, value, path: {"$set": self._sequence(sorted(value), path)},
    bytes: lambda self, value, path: {"$bytes": base64.b64encode(value).decode()},
    torch.dtype: lambda self, value, path: {"$torch": str(value).removeprefix("torch.")},
    torch.device: lambda self, value, path: {"$device": str(value)},
}


def _data_of(tensor: torch.Tensor) -> dict[str, Any]:
    stored = tensor.detach().cpu().contiguous()
    data = base64.b64encode(stored.reshape(-1).view(torch.uint8).numpy().tobytes()).decode() if stored.numel() else ""
    return {"bytes": data, "dtype": str(stored.dtype).removeprefix("torch."), "shape": list(stored.shape)}


def _tensor_of(data: dict[str, Any]) -> torch.Tensor:
    dtype, raw = getattr(torch, data["dtype"]), bytearray(base64.b64decode(data["bytes"]))
    return torch.frombuffer(raw, dtype=dtype).view(data["shape"]) if raw else torch.empty(data["shape"], dtype=dtype)


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `StateEncoder` encoded."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next((key for key in value if key.startswith(MARK)), None)
    if mark is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    return _DECODERS[mark](value, value[mark], tensors)


def _decode_array(value: dict[str, Any], data: str, _: Any) -> Any:
    array = np.frombuffer(base64.b64decode(data), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array[()] if value["scalar"] else array


_DECODERS: dict[str, Callable[[dict[str, Any], Any, Mapping[str, torch.Tensor]], Any]] = {
    "$float": lambda value, data, tensors: float(data),
    "$data": lambda value, data, tensors: _tensor_of(data),
    "$tensor": lambda value, data, tensors: tensors[data],
    "$dict": lambda value, data, tensors: {decode(key, tensors): decode(item, tensors) for key, item in data},
    "$counter": lambda value, data, tensors: Counter({decode(key, tensors): decode(item, tensors) for key, item in data}),
    "$deque": lambda value, data, tensors: deque(decode(data, tensors), value["maxlen"]),
    "$array": _decode_array,
    "$tuple": lambda value, data, tensors: tuple(decode(data, tensors)),
    "$set": lambda value, data, tensors: set(decode(data, tensors)),
    "$bytes": lambda value, data, tensors: base64.b64decode(data),
    "$torch": lambda value, data, tensors: torch.empty(0, dtype=getattr(torch, data)).dtype,
    "$device": lambda value, data, tensors: torch.device(data),
}
