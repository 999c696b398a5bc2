"""NumPy arrays of the script in the memory of parameters: nothing can make them follow the parts of a parameter."""
from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


def numpy_views(tensors: Sequence[torch.Tensor]) -> dict[int, np.ndarray]:
    """By id, the tensors in whose memory an array lies, at least in part, and that array. Python's garbage collector does not
    know arrays, so that they are looked for in all that it knows, where torch says that there may be one."""
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
    """Addresses of its first byte and of the one after its last; NumPy's own function has another place in each release."""
    start = array.__array_interface__["data"][0]
    ends = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    return start + sum(end for end in ends if end < 0), start + sum(end for end in ends if end > 0) + array.itemsize


def _may_have_views(tensor: torch.Tensor) -> bool:
    """torch never resizes a memory of which it has made an array, or that it has from one."""
    try:
        return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
    except RuntimeError:  # wrappers of a transform have no storage
        return False


def _arrays() -> Iterator[np.ndarray]:
    """All arrays that an object, or a variable of a running function, refers to."""
    seen: list[Any] = gc.get_referents(*gc.get_objects())
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename != __file__:  # else `seen` would be found in itself, and live on
                seen.extend(frame.f_locals.values())
            frame = frame.f_back
    while seen:
        yield from (each for each in seen if issubclass(type(each), np.ndarray))
        # Dictionaries and tuples of nothing that can be garbage are unknown to the collector, too.
        unknown = [each for each in seen if type(each) in (dict, tuple) and each and not gc.is_tracked(each)]
        seen = gc.get_referents(*unknown) if unknown else []
