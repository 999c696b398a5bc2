"""Benchmark calls for training steps on this rank's device: compiled forward and backward, and the optimizer."""
from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hpml_compiler.runtime.process.compute_device import device_type
from passes import compat
from passes.tracing.joint_trace import call_arguments

WARM_STEPS, PROFILED_STEPS = 5, 5
LARGE_ELEMENTS, LARGE_TENSORS = 2**20, 12
"""Parameters that do not fit in a cache together; each is small enough for the allocator to reuse its memory."""


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: its `loss`, its first scalar, or the sum of all differentiable tensors."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [x for x in compat.pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    scalar = next((x for x in leaves if x.dim() == 0), None)
    return scalar if scalar is not None else torch.stack([x.float().sum() for x in leaves]).sum()


def trainer(model: nn.Module, batch: Any, backend: str = "inductor", **options: Any) -> Callable[[], None]:
    """Call that resets gradients and runs forward and backward of the compiled model."""
    call = torch.compile(model, backend=backend, options=options or None)
    args, kwargs = call_arguments(batch)

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss_of(call(*args, **kwargs)).backward()

    return step


class ModelStep:
    """Forward and backward of a copy of the model, compiled with inductor for one device so that the profiler sees its
    kernels. `call` runs a step, `profile` profiles some steps, and `fused_us` is the result."""

    def __init__(self, model: nn.Module, batch: Any):
        with compat.visible_kernels(), compat.quiet_dynamo():
            self.call = trainer(copy.deepcopy(model), batch)
            for _ in range(WARM_STEPS):
                self.call()
        self._events: list[Any] = []
        self._steps = 0

    def profile(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device_type() == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                self.call()
        self._events += [e for e in profiler.events() or () if compat.is_fused_kernel(e.name)]
        self._steps += PROFILED_STEPS

    @property
    def fused_us(self) -> float:
        """Time per step in inductor's fused kernels."""
        return fused_kernels_us(self._events, self._steps)


def fused_kernels_us(events: Iterable[Any], steps: int) -> float:
    """Time in µs per step in fused kernels, from a profile of `steps` steps: the median of each kernel's runs times their
    number, since a mean would include other load on the machine."""
    runs: dict[str, list[float]] = {}
    for event in events:
        if compat.is_fused_kernel(event.name):
            runs.setdefault(event.name, []).append(
                event.self_device_time_total if device_type() == "cuda" else event.self_cpu_time_total)
    return sum(statistics.median(us) * len(us) for us in runs.values()) / steps


def optimizer_step(parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A step of AdamW over copies of these parameters."""
    copies = [torch.zeros_like(p, requires_grad=True) for p in parameters]
    for p in copies:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(copies)
    # Without hooks: those that the script registered for all optimizers are not for this step.
    step = functools.partial(compat.step_without_hooks(type(optimizer)), optimizer)
    for _ in range(3):
        step()
    return step


def large_optimizer_step() -> Callable[[], None]:
    """A step of AdamW over parameters so large that it is bound by memory traffic."""
    return optimizer_step([torch.zeros(LARGE_ELEMENTS, device=device_type())] * LARGE_TENSORS)
