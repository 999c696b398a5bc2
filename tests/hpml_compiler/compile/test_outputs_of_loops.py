"""Outputs of a step in microbatches or stages -> where they are computed, in one device's order of rows, with gradients."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.outputs.step_output import StepOutput
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import full

X = torch.linspace(-1, 1, 32 * 16, dtype=torch.float64).view(32, 16).sin()
Y = torch.arange(32) % 7
WIDE = 640


class Net(nn.Module):
    """inside: returns the loss beside the logits."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.body, self.head = inside, nn.Linear(16, 32).double(), nn.Linear(32, WIDE).double()

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.head(F.dropout(torch.tanh(self.body(x)), 0.2))
        return (F.cross_entropy(logits, Y), logits) if self.inside else logits


def loss_of_rows(logits: torch.Tensor) -> torch.Tensor:
    """Another weight for each row and class, so that a gradient in another order is another gradient."""
    return (logits * torch.linspace(-1, 1, 32 * WIDE, dtype=torch.float64).view(32, WIDE)).sum() + F.cross_entropy(logits, Y)


def train(model: nn.Module, call: Any) -> list[torch.Tensor]:
    found = []
    for step in range(2):
        torch.manual_seed(step)
        logits = call(X)
        found.append(logits.detach().clone())
        loss_of_rows(logits).backward()
    return [*found, *(full(p.grad) for p in model.parameters())]


def as_left(output: Any) -> Any:
    """The output as the graph left it, behind the one by which the script's loss is noted."""
    return output.record.known[output.number] if isinstance(output, StepOutput) else output


def sharded(rank: int, mesh: dict[str, int]) -> None:
    for microbatches in (1, 4):
        fresh()
        model = Net()
        expected = train(*2 * (copy.deepcopy(model),))
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": mesh, "microbatches": microbatches,
                                                             "monitor": False})
        logits = as_left(call(X))
        assert isinstance(logits, LazyOutput) and logits._local_tensor.numel() == logits.numel() // 2
        torch.testing.assert_close(train(model, call), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=["dp", "tp"])
def test_outputs_of_a_loop_stay_sharded(launch, mesh):
    launch(sharded, args=(mesh,))


class Blocks(nn.Module):
    """inside: returns the loss, too."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.body = inside, nn.ModuleList(nn.Linear(16, 16) for _ in range(4)).double()
        self.head = nn.Linear(16, WIDE).double()

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.body:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return (F.cross_entropy(logits, Y), logits) if self.inside else logits


def use_outputs(model: nn.Module, call: Any, use: str) -> list[torch.Tensor]:
    found = call(X)
    logits = found if isinstance(found, torch.Tensor) else found[1]
    if use == "hooked":
        logits.retain_grad()
        logits.register_hook(lambda gradient: 2 * gradient)
    loss = loss_of_rows(logits) if logits is found else found[0]
    loss.backward()
    more = [full(logits.grad)] if use == "hooked" else [logits.detach()[5:7]] if use == "read" else []
    return [loss.detach(), *(full(p.grad) for p in model.parameters()), *more]


def given_to_stages(rank: int, mesh: dict[str, int], uses: tuple[str, ...]) -> None:
    """pp is the first axis: the last half of the ranks has the logits."""
    for use in uses:
        fresh()
        model = Blocks(inside=use in ("unread", "read"))
        expected = use_outputs(*2 * (copy.deepcopy(model),), use)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": mesh, "microbatches": 2,
                                                             "monitor": False})
        made = call(X)[1] if model.inside else call(X)
        made = as_left(made)
        assert isinstance(made, LazyOutput) and bool(made._local_tensor.numel()) == (2 * rank >= dist.get_world_size()), use
        found = use_outputs(model, call, use)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda told, use=use: f"{use}: {told}")


def test_outputs_stay_on_the_rank_of_their_stage(launch):
    launch(given_to_stages, args=({"pp": 2}, ("outside", "hooked", "unread", "read")))


def test_outputs_stay_on_the_ranks_of_their_stage(launch):
    launch(given_to_stages, world_size=4, args=({"pp": 2, "dp": 2}, ("outside", "read")))


def gradient_of_one_row(rank: int) -> None:
    """Only one rank has a part of the gradient that is not zero."""
    model = Net(inside=True)
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}, "microbatches": 2,
                                                         "monitor": False})
    for run in (call, eager):
        torch.manual_seed(1)
        loss, logits = run(X)
        (loss + logits[0].sum()).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_one_rank_has_runs_the_batch_at_once(launch):
    launch(gradient_of_one_row)
