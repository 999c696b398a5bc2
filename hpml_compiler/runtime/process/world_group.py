"""The process group of all ranks, made if the script made none."""
from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpml_compiler.runtime.process.compute_device import device_type, init_group_on_gpus
from passes import compat

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60  # torch's own is 30 minutes for gloo: too long to learn that a rank has died


def ensure_process_group() -> int:
    """Number of ranks. Under torchrun, makes the process group if there is none: for GPUs see `devices`, else gloo.

    Its timeout is HPML_PG_TIMEOUT_S seconds, by default 60. Outside torchrun there is one rank and no group.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 1
        timeout = timedelta(seconds=float(os.environ.get("HPML_PG_TIMEOUT_S", DEFAULT_TIMEOUT_S)))
        if torch.cuda.is_available():
            init_group_on_gpus(timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
            atexit.register(_end_with_the_script)
    if "gloo" in dist.get_backend_config():
        compat.use_single_gloo_allgather()
    return dist.get_world_size()


def _end_with_the_script() -> None:
    """Ends the group that nobody but hpml knows of. Left to the end of the interpreter, a thread of gloo's may still hold a
    tensor then, and letting go of it aborts a process whose work is done (pytorch/pytorch#179291)."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):  # after an error, others may still wait for this rank
        dist.destroy_process_group()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The process group of the ranks that torchrun started, if any; ended here unless it was there before."""
    had_group = dist.is_initialized()
    ensure_process_group()
    try:
        yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()


def world_size() -> int:
    """Number of ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def control_group() -> dist.ProcessGroup:
    """All ranks, for small messages between hosts: of its own, so that none is taken for one of the data's collectives, and
    on gloo, so that no device waits for it. The first call is a collective."""
    return _host_group("control", dist.group.WORLD)


def check_group() -> dist.ProcessGroup:
    """Like `control_group`, for messages that are still on their way while others are sent."""
    return _host_group("check", dist.group.WORLD)


@functools.lru_cache(maxsize=2)
def _host_group(purpose: str, world: Any) -> Any:  # kept while it is here, so a later group is never taken for it
    return dist.new_group(backend="gloo", timeout=group_timeout())


def from_all_ranks(mine: T) -> list[T]:
    """One object of each rank, in their order, on every rank: a collective where there are several."""
    if world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=control_group())
    return found


def group_timeout() -> timedelta:
    """The time limit of the group of all ranks, whoever made it."""
    return compat.group_timeout(dist.group.WORLD)


def world_mesh() -> DeviceMesh:
    """All ranks on one axis; the same mesh at every call for one process group."""
    return _world_mesh(device_type(), dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _world_mesh(kind: str, world: Any) -> DeviceMesh:
    return init_device_mesh(kind, (dist.get_world_size(),))
