"""What the benchmarks of memory share: a step whose bytes are counted as an allocator counts them."""
from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.monitor.held import storage_bytes
from hpml_compiler.monitor.profiled import StepProfile

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
        with seen_freeing():
            profile = StepProfile("cpu")
            self.step(call)
            return profile.stop().peak_bytes or 0


LATER_S = 0.01


@contextlib.contextmanager
def seen_freeing() -> Iterator[None]:
    """Inside, each collective is waited for a moment after all ranks have begun it. gloo's threads let go of what they have
    after they have told that it is done. Where they are the last to do so, the profiler does not see it go, and counts it to
    the end of the step."""
    if not dist.is_initialized():
        yield
        return
    packet, group = torch.ops._c10d_functional.wait_tensor, dist.new_group(backend="gloo")
    usual = packet.default

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        dist.barrier(group)
        time.sleep(LATER_S)
        return usual(tensor)

    packet.default = wait
    try:
        yield
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
