"""Measure overheads of a step on several ranks: hpml's runtime, and collectives between computations."""
from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.profile.timing import TimedCall
from hpml_compiler.profile.training_steps import WARM_STEPS, trainer
from hpml_compiler.runtime.process.compute_device import device_type

FEW, MANY = 2, 12
"""Numbers of layers of the models of tiny layers."""
LINKS, PRODUCTS, ELEMENTS = 4, 16, 2**15
"""Number of collectives in the chain, of matrix products before each, and elements of a collective's tensor. The products take
several time slices of a CPU, so that ranks that share one are as far apart as in a step."""
COLLECTIVES = ("all_reduce", "all_gather")


@dataclass(frozen=True)
class RuntimeOverhead:
    """Overhead of hpml's runtime on several ranks over the same step compiled with inductor.

    graph_us: per call of a graph. tensor_us: per parameter and step, in forward, backward and the optimizer. collective_us:
    extra time of a collective between computations, as in a step, over one after a barrier, as in benchmarks. Ranks reach
    it at different times, and its thread has to wake up beside one that computes.
    """

    graph_us: float
    tensor_us: float
    collective_us: float

    @staticmethod
    def of(us: Mapping[str, float]) -> RuntimeOverhead:
        """Fit to the medians of `runtime_calls`: a line through few and many parameters; the mean of two collectives."""
        added = {layers: us[f"hpml {layers}"] - us[f"inductor {layers}"] for layers in (FEW, MANY)}
        tensor_us = max((added[MANY] - added[FEW]) / (MANY - FEW) / 2, 0.0)  # a layer has weight and bias
        graph_us = max(added[FEW] - FEW * 2 * tensor_us, 0.0) / 2
        return RuntimeOverhead(graph_us, tensor_us, between_us(us))


def between_us(us: Mapping[str, float]) -> float:
    """Extra time of a collective between computations over one after a barrier, from the medians of `collective_calls`."""
    return max((us["chain"] - us["products"]) / LINKS - sum(map(us.__getitem__, COLLECTIVES)) / 2, 0.0)


def runtime_calls() -> dict[str, TimedCall]:
    """Calls that all ranks make together: steps of tiny layers, which hpml runs replicated, and chains of collectives."""
    backends: dict[str, dict[str, Any]] = {"inductor": {}, "hpml": {"costs": "roofline", "monitor": False}}
    steps = {f"{backend} {layers}": TimedCall(_tiny_step(layers, backend, **options), samples=3, warm=1)
             for layers in (FEW, MANY) for backend, options in backends.items()}
    return {**steps, **collective_calls()}


class _Chain(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _tiny_step(layers: int, backend: str, **options: Any) -> Callable[[], None]:
    # Dynamo limits recompiles per code object, and all of these models must stay compiled.
    forward = types.FunctionType(_Chain.forward.__code__.replace(), _Chain.forward.__globals__)
    torch.manual_seed(0)
    model = type(f"Chain{layers}", (_Chain,), {"forward": forward})(layers)
    model.to(device_type())
    step = trainer(model, (torch.randn(4, 16, device=device_type()),), backend, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def whole() -> None:
        step()
        optimizer.step()

    for _ in range(WARM_STEPS):
        whole()
    return whole


def collective_calls() -> dict[str, TimedCall]:
    """A chain of matmuls with and without collectives between them, and each collective alone."""
    assert dist.group.WORLD is not None, "there is a process group"
    c10d, world, name = torch.ops._c10d_functional, dist.get_world_size(), dist.group.WORLD.group_name
    x, w = torch.ones(2, 256, 256, dtype=torch.float32, device=device_type()).unbind()
    payload = torch.ones(ELEMENTS, dtype=torch.float32, device=device_type())
    part = payload[: ELEMENTS // world]
    collectives: tuple[Callable[[], Any], ...] = (
        lambda: c10d.wait_tensor(c10d.all_reduce(payload, "sum", name)),
        lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(part, world, name)))

    def chain(with_collectives: bool) -> None:
        for link in range(LINKS):
            for _ in range(PRODUCTS):
                torch.mm(x, w)
            if with_collectives:
                collectives[link % 2]()

    alone = {kind: TimedCall(call) for kind, call in zip(COLLECTIVES, collectives)}
    return {"chain": TimedCall(lambda: chain(True)), "products": TimedCall(lambda: chain(False)), **alone}
