"""Map over the tensors of a batch: nested lists, tuples, mappings and dataclasses."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch


def map_named_tensors(function: Callable[[str, torch.Tensor], torch.Tensor], nest: Any, name: str = "") -> Any:
    """Replace each tensor of a nest by `function(name, tensor)`; structure and types stay the same.

    Names are paths as a user would write them: `labels`, `0`, `image.2.mask`. Leaves that are not tensors stay as they are.
    """
    if isinstance(nest, torch.Tensor):
        return function(name, nest)
    below = f"{name}." if name else ""
    if isinstance(nest, MutableMapping):
        result = copy.copy(nest)
        for key, value in nest.items():
            result[key] = map_named_tensors(function, value, f"{below}{key}")
        return result
    if isinstance(nest, (list, tuple)):
        fields = getattr(nest, "_fields", range(len(nest)))
        items = [map_named_tensors(function, item, f"{below}{field}") for field, item in zip(fields, nest)]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        result = copy.copy(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(result, field.name,
                               map_named_tensors(function, getattr(nest, field.name), f"{below}{field.name}"))
        return result
    return nest


def named_tensors(nest: Any) -> dict[str, torch.Tensor]:
    """Name -> tensor for all tensors of a nest, in order."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found[name] = tensor
        return tensor

    map_named_tensors(note, nest)
    return found
