"""Uses of losses and metrics in eager code after the graph: what a script computes from the outputs of a compiled model.

Not a family that the tests run; `python -m tests.scripts.table_of_losses` does. Each trains for five steps: hpml notes what
the script calls in the first, and computes it in the step, on shards, or from gathered outputs in the others. Outputs of any
size stay sharded here. A loss is a function of outputs and targets; its model gives them their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.loss_tables import LABELS, MAPS, METRICS, TOKENS, VALUES, Loss
from tests.scripts.models import classes, inputs, mlp, sgd, targets
from tests.scripts.opinfo_outputs import small_outputs
from tests.scripts.use import Script, Use

STEPS, TOLERANCE = 5, 1e-12
Found = tuple[torch.Tensor, Any]
"""A loss, and what else the script reads in the step."""


class Rows(nn.Sequential):
    """8 x 4."""

    def __init__(self) -> None:
        super().__init__(*mlp())

    @staticmethod
    def batch(step: int) -> torch.Tensor:
        return (inputs() + step).sin()


class Sequences(nn.Module):
    """8 x 6 x 12, of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.words(x)).cumsum(1)))

    @staticmethod
    def batch(step: int) -> torch.Tensor:
        return (torch.arange(48) * 5 + 3 * step).view(8, 6) % 12


class Images(nn.Sequential):
    """4 x 3 x 8 x 8."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1))

    @staticmethod
    def batch(step: int) -> torch.Tensor:
        return (torch.linspace(-3, 3, 4 * 2 * 8 * 8, dtype=torch.float64).view(4, 2, 8, 8) * (7 + step)).sin()


def _labels(step: int, shape: tuple[int, ...], count: int) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()) * 3 + step
    return (numbers % count).view(shape)


def train(hp: Script, kind: type[Any], loss_of: Callable[[torch.Tensor, int], Found]) -> Any:
    """Some steps with the loss in the script -> what it saw of each, model and optimizer."""
    torch.manual_seed(1)
    model = kind().double()
    with small_outputs(wait=True):
        call, optimizer, seen = hp.compile(model), sgd(model, lr=0.02), []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss, further = loss_of(call(kind.batch(step)), step)
            loss.backward()
            optimizer.step()
            seen.append((loss.item(), further))
    return seen, model, optimizer


def use_of(name: str, run: Callable[[Script], Any], module: str = __name__) -> Callable[[Script], Any]:
    """A use of that module, to 1e-12."""

    def script(hp: Script) -> Any:
        return run(hp)

    use = Use(f"{module.rpartition('.')[2]}.{name}", script, tolerance=TOLERANCE, limit_s=60)
    script.__module__ = module
    vars(script)["use"] = use
    return script


def _uses(kind: type[Any], losses: Mapping[str, Loss], target: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    return {
        f"use {name}": use_of(name, lambda hp, loss=loss: train(hp, kind, lambda out, step: (loss(out, target(step)), None)))
        for name, loss in losses.items()
    }


def _with_metric(metric: Callable[..., Any]) -> Callable[[torch.Tensor, int], Found]:
    return lambda out, step: (F.cross_entropy(out, y := (classes() + step) % 4), metric(out.detach(), y))


globals().update(
    _uses(Rows, VALUES, lambda step: targets() * (1 + 0.1 * step))
    | _uses(Rows, LABELS, lambda step: (classes() + step) % 4)
    | _uses(Sequences, TOKENS, Sequences.batch)
    | _uses(Images, MAPS, lambda step: _labels(step, (4, 8, 8), 3))
    | {
        f"use metric_{name}": use_of(f"metric_{name}", lambda hp, metric=metric: train(hp, Rows, _with_metric(metric)))
        for name, metric in METRICS.items()
    }
)
