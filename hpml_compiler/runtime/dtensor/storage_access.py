"""Access of scripts to the memory of placed tensors: the tensor's own if a rank has all of it, else a placeholder.

Tied tensors are identified by their storage addresses, so placeholders must have distinct ones; the memory behind a sharded
tensor is only a part.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.op_dispatch import VIEW_STEP
from passes import compat
from passes.errors import HpmlError

_NOT_TO_BE_READ = 1 << 55
"""Bits of an address: a read there faults on the CPU (x86-64, ARM) or GPU instead of reading another tensor's memory."""


def is_everywhere(tensor: DTensor) -> bool:
    """True if this rank's part is the full tensor, in its own memory."""
    return all(placement.is_replicate() for placement in tensor.placements) and not hasattr(tensor, VIEW_STEP)


class StoredInParts(torch.UntypedStorage):
    """Placeholder for the storage of a sharded tensor, with a size and an address to compare. torch's own storage of such
    tensors is writable, and a write would crash the process."""

    part: torch.Tensor

    def data_ptr(self) -> int:
        return _NOT_TO_BE_READ | (self.part.untyped_storage().data_ptr() or self.part.untyped_storage()._cdata)

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("its storage cannot be read, written or resized")

    __getitem__ = __setitem__ = __copy__ = __deepcopy__ = resize_ = fill_ = copy_ = clone = tolist = byteswap = _refused
    cpu = cuda = to = pin_memory = share_memory_ = _share_filename_cpu_ = _share_fd_cpu_ = _share_cuda_ = _refused


def refused(why: str, tensor: DTensor | None = None) -> HpmlError:
    where = "this tensor" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
    return HpmlError(f"the tensor is sharded over the ranks, so {why}", where, "for its values, use "
                     "tensor.full_tensor(); to change them, tensor.copy_(values) or, for a parameter, parameter.data = values, "
                     "which keep the shape")


def of_memory(func: Callable[..., Any], name: str, args: tuple) -> Any:
    """`untyped_storage`, `storage` and `is_set_to` of placed tensors."""
    tensor = args[0]
    placed = isinstance(tensor, DTensor)
    if compat.is_tracing() or (placed and compat.is_fake(tensor._local_tensor)):
        return func(*args)
    if name == "is_set_to":
        return func(*(each._local_tensor if isinstance(each, DTensor) else each for each in args))
    if not placed or is_everywhere(tensor):
        return func(tensor._local_tensor if placed else tensor, *args[1:])
    if name == "untyped_storage":
        storage: Any = func(tensor)
        storage.__class__, storage.part = StoredInParts, tensor._local_tensor
        return storage
    raise refused("its storage cannot be accessed", tensor)
