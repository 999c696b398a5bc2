"""The memory of placed tensors, as scripts ask for it: the tensor's own where a rank has all of it, else a name for it.

Tied tensors are told from others by the addresses of storages, so those must differ; but the memory behind a sharded one is a
part.
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
"""In an address: whoever reads there gets a fault of the processor (x86-64, ARM) or the GPU, not another tensor's memory."""


def is_everywhere(tensor: DTensor) -> bool:
    """True if this rank's part is the whole tensor, in its own memory."""
    return all(placement.is_replicate() for placement in tensor.placements) and not hasattr(tensor, VIEW_STEP)


class StoredInParts(torch.UntypedStorage):
    """Stands for the storage of a tensor of which each rank has a part: it has a size and an address to compare. That it can be
    written to, as torch's own of such tensors, would end the process."""

    part: torch.Tensor

    def data_ptr(self) -> int:
        return _NOT_TO_BE_READ | (self.part.untyped_storage().data_ptr() or self.part.untyped_storage()._cdata)

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("its storage cannot be read, written or resized")

    __getitem__ = __setitem__ = __copy__ = __deepcopy__ = resize_ = fill_ = copy_ = clone = tolist = byteswap = _refused
    cpu = cuda = to = pin_memory = share_memory_ = _share_filename_cpu_ = _share_fd_cpu_ = _share_cuda_ = _refused


def refused(why: str, tensor: DTensor | None = None) -> HpmlError:
    where = "this tensor" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
    return HpmlError(f"the tensor is stored in parts on the ranks, so {why}", where, "for its values, use "
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
    raise refused("it has no storage that a script can use", tensor)
