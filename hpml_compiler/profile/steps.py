"""Time compiled training steps on this rank's device: fused kernels, the rest of a step, the optimizer.

What a step takes besides its kernels is host time: guards, wrappers, calls. It is charged per kernel of the plan; what
hpml's runtime adds on several ranks, per call of a graph and per parameter.
"""
from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.trace import call_arguments
from passes import compat

WARM_STEPS, STEPS = 5, 15
LARGE_ELEMENTS, LARGE_TENSORS = 2**20, 12
"""Parameters that no cache holds together; each small enough that the allocator keeps its memory between steps."""


@dataclass(frozen=True)
class StepTimes:
    """One forward and backward pass on one device. fused_us: in the kernels that the compiler made of light operations."""

    wall_us: float
    fused_us: float


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output, or the sum of what can be differentiated."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [x for x in compat.pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    scalar = next((x for x in leaves if x.dim() == 0), None)
    return scalar if scalar is not None else torch.stack([x.float().sum() for x in leaves]).sum()


def trainer(model: nn.Module, batch: Any, backend: str = "inductor", **options: Any) -> Callable[[], None]:
    """Forward and backward of the compiled model, gradients dropped before."""
    call = torch.compile(model, backend=backend, options=options or None)
    args, kwargs = call_arguments(batch)

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss_of(call(*args, **kwargs)).backward()

    return step


def step_times(model: nn.Module, batch: Any) -> StepTimes:
    """Of a copy of the model, compiled for one device with inductor, its kernels visible to the profiler."""
    with compat.visible_kernels(), compat.quiet_dynamo():
        step = trainer(copy.deepcopy(model), batch)
        for _ in range(WARM_STEPS):
            step()
    wall_us = median_us(step)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
    torch.compiler.reset()
    return StepTimes(wall_us, fused_kernels_us(profiler.events() or ()))


def fused_kernels_us(events: Iterable[Any]) -> float:
    """Time of one step in fused kernels, of a profile of STEPS of them: of each kernel the median of its runs, times
    their number, since a mean counts whatever else the machine did meanwhile."""
    runs: dict[str, list[float]] = {}
    for event in events:
        if compat.is_fused_kernel(event.name):
            runs.setdefault(event.name, []).append(
                event.self_device_time_total if torch.cuda.is_available() else event.self_cpu_time_total)
    return sum(statistics.median(us) * len(us) for us in runs.values()) / STEPS


def optimizer_us(parameters: list[torch.Tensor]) -> float:
    """A step of AdamW over copies of these parameters."""
    copies = [torch.zeros_like(p, requires_grad=True) for p in parameters]
    for p in copies:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(copies)
    for _ in range(3):
        optimizer.step()
    return median_us(optimizer.step)


def optimizer_traffic_us_per_element() -> float:
    """AdamW over large parameters, in float32."""
    return optimizer_us([torch.zeros(LARGE_ELEMENTS) for _ in range(LARGE_TENSORS)]) / (LARGE_ELEMENTS * LARGE_TENSORS)


@dataclass(frozen=True)
class RuntimeOverhead:
    """What hpml's runtime adds on several ranks to the same step of inductor, without communication.

    graph_us: per call of a graph; tensor_us: per parameter and step, in forward, backward and the optimizer.
    """

    graph_us: float
    tensor_us: float


def runtime_overhead() -> RuntimeOverhead:
    """Of chains of tiny layers, which hpml runs replicated on all ranks: a line through few and many parameters."""
    few, many = 2, 12
    added = {layers: _tiny_step_us(layers, "hpml", costs="roofline") - _tiny_step_us(layers, "inductor")
             for layers in (few, many)}
    tensor_us = max((added[many] - added[few]) / (many - few) / 2, 0.0)  # a layer has weight and bias
    return RuntimeOverhead(max(added[few] - few * 2 * tensor_us, 0.0) / 2, tensor_us)


def _tiny_step_us(layers: int, backend: str, **options: Any) -> float:
    from hpml_compiler import session

    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(16, 16), nn.Tanh())))
    session.reset()
    step = trainer(model, (torch.randn(4, 16),), backend, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def whole() -> None:
        step()
        optimizer.step()

    for _ in range(WARM_STEPS):
        whole()
    took = median_us(whole)
    session.reset()
    torch.compiler.reset()
    return took


CHAIN_LINKS, CHAIN_ELEMENTS = 24, 2**15


def collective_in_step_us() -> float:
    """What a collective takes more between computations, as in a step, than after a barrier, as it is timed alone.

    Ranks come to it at other times, and the thread that carries it out has to be woken beside one that computes. The
    mean of all_reduce and all_gather over all ranks, of a chain of collectives with products between them.
    """
    assert dist.group.WORLD is not None, "there is a process group"
    c10d, world, name = torch.ops._c10d_functional, dist.get_world_size(), dist.group.WORLD.group_name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.randn(256, 256, device=device), torch.randn(256, 256, device=device)
    payload = torch.ones(CHAIN_ELEMENTS, device=device)
    collectives = (lambda: c10d.wait_tensor(c10d.all_reduce(payload, "sum", name)),
                   lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(payload[: CHAIN_ELEMENTS // world], world, name)))

    def chain(with_collectives: bool) -> None:
        dist.barrier()
        for link in range(CHAIN_LINKS):
            torch.mm(x, w)
            if with_collectives:
                collectives[link % 2]()

    between_us = (median_us(lambda: chain(True)) - median_us(lambda: chain(False))) / CHAIN_LINKS
    alone_us = sum(median_us(each, before=dist.barrier) for each in collectives) / 2
    return max(between_us - alone_us, 0.0)


def median_us(call: Callable[[], Any], repeats: int = STEPS, before: Callable[[], Any] = lambda: None) -> float:
    """Median time of a call. before: is called before each, and is not timed."""
    samples = []
    for _ in range(repeats):
        before()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)
