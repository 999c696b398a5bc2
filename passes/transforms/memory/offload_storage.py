"""Offload memory: pinned host memory for a GPU, a memory-mapped file for a CPU.

A file is unlinked before anything is written to it, so that nothing is left behind in any case: its space
is freed with the last tensor on it.
"""
from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Sequence

import torch

from passes.errors import HpmlError
from passes.session_state import state_of


def reserve(nbytes: int, device: torch.device, folder: str = "") -> torch.UntypedStorage:
    """Allocate memory for offloading from `device`. folder: of a CPU's files; "": the default for temporary files."""
    if device.type == "cpu":
        return _file(nbytes, folder or tempfile.gettempdir())
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()


def tensor_on(storage: torch.UntypedStorage, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, tuple(size), tuple(stride))


def moved(tensor: torch.Tensor, folder: str = "") -> torch.Tensor:
    """A copy in offload memory, with the same strides if these leave no gaps."""
    there = tensor_on(reserve(tensor.numel() * tensor.element_size(), tensor.device, folder), tensor.dtype, tensor.shape,
                      torch.empty_like(tensor, device="meta").stride())
    return there.copy_(tensor)


def is_offload_storage(tensor: torch.Tensor) -> bool:
    """True if the tensor is in offload memory."""
    return tensor.device.type == "cpu" and (tensor.untyped_storage().data_ptr() in state_of(_MappedFiles)
                                            or torch.cuda.is_available() and tensor.is_pinned())


class _MappedFiles(set[int]):
    """Addresses of mapped files."""


def _file(nbytes: int, folder: str) -> torch.UntypedStorage:
    try:
        handle, name = tempfile.mkstemp(prefix="hpml_", dir=folder)
    except OSError as error:
        raise HpmlError(f"cannot create a file for offloaded activations: {error}", folder,
                        "name a folder that can be written to: offload_folder") from error
    try:
        _take_space(handle, nbytes)
        return _map(handle, nbytes)
    except OSError as error:
        raise HpmlError(f"{nbytes} bytes cannot be offloaded to a file: {error.strerror}", folder,
                        "free space there, or name a folder of another disk: offload_folder") from error
    finally:
        os.unlink(name)
        os.close(handle)


def _map(handle: int, nbytes: int) -> torch.UntypedStorage:
    """Map a file. torch's own file mapping counts as allocated; Python's keeps the file open, and a process may have a
    thousand."""
    address = _c().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _not_mapped(nbytes, ctypes.get_errno())
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    maps = state_of(_MappedFiles)
    maps.add(address)
    weakref.finalize(memory, _unmap, maps, address, nbytes).atexit = False  # tensors may outlive Python's modules
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _not_mapped(nbytes: int, code: int) -> HpmlError:
    """The error for a file that has its space on disk, but no addresses."""
    limit, what = resource.getrlimit(resource.RLIMIT_AS)[0], f"{nbytes} bytes of offloaded values cannot be mapped"
    if code == errno.ENOMEM and limit != resource.RLIM_INFINITY:
        return HpmlError(f"{what}: with them, the addresses of this process exceed its limit of {limit} bytes, which counts "
                         "mapped files although they take no memory", "RLIMIT_AS (ulimit -v)",
                         "raise the limit, or bound memory by a control group instead; or leave offload out")
    return HpmlError(f"{what}: {os.strerror(code)}", "mmap",
                     "see vm.max_map_count and vm.overcommit_memory of this machine; or leave offload out")


def _unmap(maps: _MappedFiles, address: int, nbytes: int) -> None:
    maps.discard(address)
    _c().munmap(address, nbytes)


@functools.cache
def _c() -> ctypes.CDLL:
    c = ctypes.CDLL(None, use_errno=True)
    c.mmap.argtypes, c.mmap.restype = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long), ctypes.c_void_p
    c.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return c


def _take_space(handle: int, nbytes: int) -> None:
    """Allocate the space now: writing to a sparse mapped file kills the process by a signal when the disk is full, with no
    error."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
        return
    block = bytes(1 << 20)
    for start in range(0, nbytes, len(block)):
        os.write(handle, block[: nbytes - start])
