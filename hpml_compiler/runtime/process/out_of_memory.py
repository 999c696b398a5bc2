"""Out of memory: the errors that mean it, the memory that is left, and errors of what cannot be repeated."""
from __future__ import annotations

import gc
import re
import resource

import psutil
import torch

from hpml_compiler.runtime.process.compute_device import device_type
from passes.errors import HpmlError
from passes.hardware import control_groups

_SAID = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA error: out of memory|"
                   r"CU(BLAS|DNN|SOLVER|FFT|SPARSE)_(STATUS_)?(ALLOC_FAILED|NOT_ENOUGH_WORKSPACE)")
"""RuntimeErrors of torch's allocator for the CPU, and of libraries that allocate on a GPU themselves."""
_ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


class StepTooLarge(HpmlError, torch.OutOfMemoryError):
    """A step that ran out of memory, and cannot be repeated or fits under no plan."""


class OutOfMemoryOnRank(HpmlError, torch.OutOfMemoryError):
    """A call of a graph that ran out of memory on at least one rank, raised on all of them in the same call."""


def memory_failure(error: BaseException) -> str:
    """A few words of an error of memory; "" for any other error. A MemoryError is one, whether Python's or NumPy's own or that
    of a library in C++ (std::bad_alloc): less memory for tensors leaves more to these."""
    if isinstance(error, OutOfMemoryOnRank):
        return error.what
    said = isinstance(error, RuntimeError) and _SAID.search(str(error))
    if not said and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ""
    asked = _ASKED.search(str(error))
    return "it ran out of memory" + (f" (it tried to allocate {asked[1]})" if asked else "")


def free_memory() -> None:
    """Release what only garbage and torch's caches hold."""
    gc.collect()
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def mapped_files_count() -> bool:
    """True if the memory of mapped files counts in a limit of this process, as in that of `ulimit -v`."""
    return device_type() == "cpu" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def room_bytes() -> int:
    """Bytes that this process can still allocate on its device: of a CPU, what the system, its container and its own limits
    leave."""
    if device_type() == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    used = psutil.Process().memory_info()
    limits = {resource.RLIMIT_AS: used.vms, resource.RLIMIT_DATA: getattr(used, "data", used.rss)}
    left = [psutil.virtual_memory().available]
    found = [(resource.getrlimit(kind)[0], taken) for kind, taken in limits.items()]
    left += [limit - taken for limit, taken in found if limit != resource.RLIM_INFINITY]
    if (in_container := control_groups.bytes_left()) is not None:
        left.append(in_container)
    return max(min(left), 0)
