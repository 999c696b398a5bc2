"""Shared by the memory benchmarks: a step whose bytes are counted as an allocator counts them."""
from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.runtime.optimizer.resident_memory import storage_bytes

MIB = 2**20


@dataclass
class Training:
    """A model that is trained by AdamW: what a step takes besides is what is measured."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, ...]
    device: str = "cpu"

    def state_bytes(self) -> int:
        """Parameters and the optimizer's state, this rank's parts."""
        kept = (value for state in self.optimizer.state.values() for value in state.values())
        return storage_bytes([*self.model.parameters(), *(value for value in kept if isinstance(value, torch.Tensor))])

    def step(self, call: Callable[..., Any]) -> float:
        """The loss. Gradients are gone at the end, so that between steps only the state is held."""
        loss = call(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def peak_above_state(self, call: Callable[..., Any]) -> int:
        """Bytes allocated at most during a step, besides what is held between steps."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(call)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        return peak_of(lambda: self.step(call))


LATER_S = 0.01
WAITS = 3


def peak_of(step: Callable[[], Any]) -> int:
    """The most bytes allocated on CPUs at once during a step, which leaves nothing that it allocates.

    gloo's threads let go of what they have after they have told that it is done. Where they are the last to do so, the profiler
    does not see it go. So each collective is waited for a moment after all ranks have begun it; and what is never seen to go is
    taken to be gone when so many more were waited for.
    """
    if not dist.is_initialized():
        profile = StepProfile("cpu")
        step()
        return profile.stop().peak_bytes or 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile, \
            later_waits() as waits:
        step()
    changes: list[tuple[int, int]] = []
    there: dict[int, tuple[int, int]] = {}  # by address: when it was allocated, bytes
    for now, nbytes, address in sorted(_allocations(profile.profiler.kineto_results.experimental_event_tree())):  # pyright: ignore
        if nbytes < 0:
            changes.append((now, nbytes))
            there.pop(address, None)
            continue
        if address in there:
            changes.append(_unseen(*there[address], waits, now))
        changes.append((now, nbytes))
        there[address] = now, nbytes
    changes += [_unseen(since, nbytes, waits) for since, nbytes in there.values()]
    return max(itertools.accumulate(nbytes for _, nbytes in sorted(changes)))


def _allocations(tree: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """When, how many bytes, and where; less than nothing where memory is freed."""
    stack = list(tree)
    while stack:
        event = stack.pop()
        stack += event.children
        if str(event.tag).endswith("Allocation"):
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr


def _unseen(since: int, nbytes: int, waits: list[int], latest: int | None = None) -> tuple[int, int]:
    """When what was allocated then is taken to be gone."""
    later = [each for each in waits if each > since][:WAITS]
    end = later[-1] if later else since
    return end if latest is None else min(end, latest), -nbytes


@contextlib.contextmanager
def later_waits() -> Iterator[list[int]]:
    """When each collective was waited for, which is a moment after all ranks have begun it."""
    packet, group, waits = torch.ops._c10d_functional.wait_tensor, dist.new_group(backend="gloo"), list[int]()
    usual = packet.default

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        dist.barrier(group)
        time.sleep(LATER_S)
        found = usual(tensor)
        waits.append(time.time_ns())
        return found

    packet.default = wait
    try:
        yield waits
    finally:
        packet.default = usual
        dist.destroy_process_group(group)


def training(model: nn.Module, batch: Iterable[torch.Tensor], device: str = "cpu") -> Training:
    model = model.to(device)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tuple(t.to(device) for t in batch), device)


def smallest_budget(error: Exception) -> int | None:
    """Of an error that the backend raised: the least budget that works, as far as hpml knows."""
    found = getattr(getattr(error, "inner_exception", error), "smallest_budget_bytes", None)
    return None if found is None else math.ceil(found)
