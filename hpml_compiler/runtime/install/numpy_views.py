"""Find NumPy arrays that share memory with parameters: such parameters cannot be sharded, the array would not follow."""
from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


def numpy_views(tensors: Sequence[torch.Tensor]) -> dict[int, np.ndarray]:
    """id of a tensor -> a NumPy array that overlaps its storage. Python's garbage collector does not track arrays, so they
    are searched for among the referents of all tracked objects, only if some storage is not resizable."""
    marked = [tensor for tensor in tensors if _may_have_views(tensor)]
    found: dict[int, np.ndarray] = {}
    for array in _arrays() if marked else ():
        start, end = _bounds(array)
        for tensor in marked:
            storage = tensor.untyped_storage()
            first = storage.data_ptr()
            if array.size and start < first + storage.nbytes() and first < end:
                found[id(tensor)] = array
    return found


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Addresses of the first byte and of the byte after the last. (NumPy's `byte_bounds` moves between releases.)"""
    start = array.__array_interface__["data"][0]
    ends = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    return start + sum(end for end in ends if end < 0), start + sum(end for end in ends if end > 0) + array.itemsize


def _may_have_views(tensor: torch.Tensor) -> bool:
    """True for CPU tensors whose storage is not resizable, as are storages that torch shares with an array."""
    try:
        return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
    except RuntimeError:  # wrappers of a transform have no storage
        return False


def _arrays() -> Iterator[np.ndarray]:
    """All arrays that a tracked object or a local variable of a running function refers to."""
    seen: list[Any] = gc.get_referents(*gc.get_objects())
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename != __file__:  # skip this module's frames: `seen` would contain itself
                seen.extend(frame.f_locals.values())
            frame = frame.f_back
    while seen:
        yield from (each for each in seen if issubclass(type(each), np.ndarray))
        # The collector does not track dicts and tuples without tracked items either.
        unknown = [each for each in seen if type(each) in (dict, tuple) and each and not gc.is_tracked(each)]
        seen = gc.get_referents(*unknown) if unknown else []
