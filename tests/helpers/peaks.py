"""Measured peaks of training steps."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.runtime.optimizer.resident_memory import local, storage_bytes
from passes.transforms.memory.offload_storage import is_offload_storage

STEPS = 8


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's parts of the tensors of an optimizer's state."""
    return [local(x) for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes on this rank between steps, without those of offloaded tensors."""
    tensors = [*map(local, model.parameters()), *state_tensors(optimizer)]
    return storage_bytes(x for x in tensors if not is_offload_storage(x))


def least_peak(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The least peak of eight steps, in bytes on this rank.

    gloo's threads may be the last to refer to a tensor that ranks exchanged. The profiler of a step sees no frees on other
    threads: such a tensor counts as held until the step ends, in about a third of the steps, and in more on a busy machine.
    """
    held = held_bytes(model, optimizer)
    peaks: list[int] = []
    for _ in range(STEPS):
        profile = StepProfile("cpu")
        step()
        measured = profile.stop_at_peak(held)
        if measured is not None:  # torch's profiler did not fail
            peaks.append(measured)
    return min(peaks)
