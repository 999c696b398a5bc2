"""Joint graphs with what planning knows of them, for tests; models may be fake, so that they can be large."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hpml_compiler.planning import Annotated, annotate
from passes import compat
from passes.interface import GraphInput, kind_of_input


class _Captured(Exception):
    """Raised by the partitioner once it has the joint graph: nothing is compiled or run."""


@dataclass
class Joint:
    """forward_outputs: how many outputs are forward's. inputs, values: of the Dynamo graph, in its order."""

    gm: fx.GraphModule
    forward_outputs: int
    inputs: list[GraphInput]
    values: list[Any]

    def annotated(self) -> Annotated:
        """Normalizes the graph in place, too."""
        return annotate(self.gm, self.inputs, self.forward_outputs)


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Models and batches made in it have shapes but no data."""
    with compat.tracing_fake_mode():
        yield


def trace_joint(model: Callable[..., Any], *batch: Any) -> Joint:
    """The joint graph of `model(*batch)`; its first one, if Dynamo breaks it."""
    found: list[Joint] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        names = [compat.source_name(source) if source else "" for source in compat.input_sources(gm)]
        inputs = []
        for value, name in zip(examples, names, strict=True):
            kind = kind_of_input(value, name)
            inputs.append(GraphInput(short(name), kind, getattr(value, "requires_grad", False), kind == "parameter"))

        def partition(joint: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object) -> None:
            found.append(Joint(joint, num_fwd_outputs, inputs, list(examples)))
            raise _Captured

        return compat.aot_autograd(
            fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=compat.inductor_decompositions()
        )(gm, examples)

    torch.compiler.reset()
    try:
        torch.compile(model, backend=backend, dynamic=False)(*batch)
    except Exception:
        if not found:
            raise
    finally:
        torch.compiler.reset()
    return found[0]


def short(expression: str) -> str:
    """`L['self']._modules['head']._parameters['weight']` -> `head.weight`"""
    for word in ("L['self'].", "_modules", "_parameters", "_buffers"):
        expression = expression.replace(word, "")
    return expression.replace("']['", ".").replace("'].['", ".").removeprefix("['").removesuffix("']")


def mlp(width: int, hidden: int, layers: int = 2) -> nn.Module:
    """Residual blocks of two matrix products, and a loss."""
    return _MLP(width, hidden, layers)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList([_Block(width, hidden) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
