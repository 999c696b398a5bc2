"""Process group of all ranks, created if the script has not, and helper groups for small messages."""
from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpml_compiler.runtime.process.compute_device import device_type, init_group_on_gpus
from passes import compat
from passes.session_state import state_of

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60  # torch's default for gloo is 30 minutes: too long to detect that a rank has died


def ensure_process_group() -> int:
    """Create the process group under torchrun if there is none, and return the number of ranks.

    The backend is gloo without GPUs, else see `init_group_on_gpus`. The timeout is HPML_PG_TIMEOUT_S seconds, by default 60.
    Outside torchrun there is one rank and no group.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 1
        timeout = _wanted_timeout()
        if torch.cuda.is_available():
            init_group_on_gpus(timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
            atexit.register(_end_with_the_script)
    if "gloo" in dist.get_backend_config():
        compat.use_single_gloo_allgather()
    return dist.get_world_size()


def form_process_group(store: Any, rank: int, ranks: int) -> None:
    """Create the process group in place of one that was destroyed, over gloo, with the timeout of `ensure_process_group`."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_wanted_timeout())
    atexit.unregister(_end_with_the_script)
    atexit.register(_end_with_the_script)
    ensure_process_group()


def _wanted_timeout() -> timedelta:
    return timedelta(seconds=float(os.environ.get("HPML_PG_TIMEOUT_S", DEFAULT_TIMEOUT_S)))


def _end_with_the_script() -> None:
    """Destroy the group that hpml created. At interpreter shutdown, a thread of gloo may still refer to a tensor, and releasing
    it would abort a process that has finished its work (pytorch/pytorch#179291)."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):  # after an error, others may still wait for this rank
        dist.destroy_process_group()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Context manager with the process group of torchrun's ranks, if any; destroyed on exit unless it existed before."""
    had_group = dist.is_initialized()
    ensure_process_group()
    try:
        yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def control_group() -> dist.ProcessGroup:
    """Group of all ranks for small host messages: separate, so that they never match collectives of data, and on gloo, so
    that no device waits for them. The first call is a collective."""
    return _host_group("control")


def check_group() -> dist.ProcessGroup:
    """Like `control_group`, for asynchronous messages that are in flight while others are sent."""
    return _host_group("check")


def copies_group() -> dist.ProcessGroup:
    """Like `control_group`, for copies of state that are in flight during a step."""
    return _host_group("copies")


def memory_group() -> dist.ProcessGroup:
    """Like `control_group`, for the agreement at the end of each call of a graph, also inside of a compilation."""
    return _host_group("memory")


class _WorldGroups:
    """Helper groups and the mesh of `world`, the group of all ranks. It is kept alive, so that a later one has another id."""

    def __init__(self) -> None:
        self.world: Any = None
        self.made: dict[str, Any] = {}

    def get(self, purpose: str, make: Callable[[], T]) -> T:
        if self.world is not dist.group.WORLD:
            self.world, self.made = dist.group.WORLD, {}
        if purpose not in self.made:
            self.made[purpose] = make()
        return self.made[purpose]

    def close(self) -> None:
        if self.world is not None and self.world is dist.group.WORLD:
            for group in self.made.values():
                if isinstance(group, dist.ProcessGroup):
                    dist.destroy_process_group(group)


def _host_group(purpose: str) -> dist.ProcessGroup:
    def make() -> Any:
        return dist.new_group(backend="gloo", timeout=group_timeout())

    return state_of(_WorldGroups).get(purpose, make)


def from_all_ranks(mine: T) -> list[T]:
    """All-gather one object per rank, in order of ranks. A collective if there are several ranks."""
    if world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=control_group())
    return found


def group_timeout() -> timedelta:
    """Timeout of the group of all ranks, whether created by hpml or the script."""
    return compat.group_timeout(dist.group.WORLD)


def world_mesh() -> DeviceMesh:
    """One-axis mesh of all ranks; the same object at every call for one process group."""
    kind = device_type()
    return state_of(_WorldGroups).get(f"mesh of {kind}", lambda: init_device_mesh(kind, (dist.get_world_size(),)))
