"""On ranks, outputs beside the loss are compiled without a gradient; one that arrives all the same is eager mode's."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

import hpml_compiler.compile.wrapper.detached_outputs as wrapper
from hpml_compiler.runtime.watchdog.barrier_check import RankDiverged
from passes.errors import HpmlError
from passes.transforms.outputs import outputs_beside_loss
from tests.helpers.frozen import fresh
from tests.hpml_compiler.compile.wrapper.test_detached_outputs import hooked, scaled, twice
from tests.hpml_compiler.runtime.common import full

X, Y = torch.arange(64, dtype=torch.float64).view(8, 8).sin(), torch.arange(8)
Run = Callable[..., Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(self.dense(x)), 0.3)


class Net(nn.Module):
    """Returns its loss, predictions, and what a second head makes. normed: with statistics that each call changes."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.blocks = nn.Linear(8, 16), nn.Sequential(*(Block() for _ in range(2)))
        self.norm = nn.BatchNorm1d(16) if normed else nn.Identity()
        self.head, self.other = nn.Linear(16, 32), nn.Linear(16, 4)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.norm(self.blocks(self.body(x)))
        logits = self.head(hidden)
        return F.cross_entropy(logits, y), logits * 2, self.other(hidden).sin()


def of_both(loss: Any, logits: Any) -> Any:
    return loss + logits.square().mean()


def loss_changes(model: nn.Module, run: Run) -> None:
    """From step 4 on, the loss is made of two outputs; every third step, the script evaluates."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss, logits, _ = run(X, Y)
        (of_both(loss, logits) if step >= 4 else loss).backward()
        optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                run(X[:4], Y[:4])


def alternately(_: nn.Module, run: Run) -> None:
    for uses_both in (True, False, True, False):
        loss, logits, _ = run(X, Y)
        (of_both(loss, logits) if uses_both else loss).backward()


def accumulated(_: nn.Module, run: Run) -> None:
    terms = [run(X + k, Y) for k in range(2)]
    for loss, logits, _ in terms:
        of_both(loss, logits).backward()


def checkpointed(_: nn.Module, run: Run) -> None:
    for uses_both in (False, True):
        loss, logits, _ = checkpoint(run, X, Y, use_reentrant=False)
        (of_both(loss, logits) if uses_both else loss).backward()


def gradients(model: Any, run: Run) -> list[torch.Tensor]:
    loss, logits, other = run(X, Y)
    weights = [model.head.weight, model.body.weight]
    return [*torch.autograd.grad(loss, weights, retain_graph=True), *torch.autograd.grad(of_both(loss, other), weights)]


def clipped(model: nn.Module, run: Run) -> list[torch.Tensor]:
    loss, _, other = run(X, Y)
    of_both(loss, other).backward()
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.1)]


SCENES: tuple[Callable[[Any, Run], list[Any] | None], ...] = (
    loss_changes, alternately, accumulated, checkpointed, gradients, clipped, lambda _, run: [twice(*run(X, Y))],
    lambda _, run: [scaled(*run(X, Y))], lambda _, run: [hooked(*run(X, Y))])
"""A gradient arrives at a second output in call 5, alternately, and in other ways."""
CASES: tuple[tuple[dict[str, Any], bool, tuple[Callable[[Any, Run], list[Any] | None], ...]], ...] = (
    ({"mesh": {"dp": 2}}, True, SCENES[:4]), ({"mesh": {"tp": 2}}, False, SCENES[1:5]),
    ({"mesh": {"dp": 2}, "zero": 3}, False, SCENES[::-1]), ({"mesh": {"pp": 2}, "microbatches": 2}, False, SCENES[:3]),
    ({"mesh": {"dp": 2}, "microbatches": 2}, False, SCENES[1:5:2]))
"""Options, whether the model has a BatchNorm, and scenes."""


def states(model: nn.Module) -> list[torch.Tensor | None]:
    return [*(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters()), *model.buffers()]


def run_table(_: int) -> None:
    outputs_beside_loss.LEAST_BYTES = 0
    compiled_for: list[tuple[int, ...]] = []
    detach = wrapper.detach_results
    wrapper.detach_results = lambda gm, positions: compiled_for.append((*positions,)) or detach(gm, positions)
    for options, normed, scenes in CASES:
        fresh()
        compiled_for.clear()
        eager = Net(normed)
        model = copy.deepcopy(eager)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
        for scene in scenes:
            found = []
            for each, run in ((eager, eager), (model, call)):
                each.zero_grad()
                torch.manual_seed(1)
                with functorch.patch(donated_buffer=False):  # as torch asks for with retain_graph=True
                    found.append([full(x) for x in (*(scene(each, run) or ()), *states(each), torch.rand(1))])
            torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12,
                                       msg=lambda told, at=(options, scene): f"{at}: {told}")
        assert compiled_for[0] == (1, 2) and len(compiled_for) <= 3, (options, compiled_for)


def test_gradients_at_any_output_are_those_of_eager_mode(launch):
    launch(run_table, world_size=2)


def run_refused(rank: int) -> None:
    outputs_beside_loss.LEAST_BYTES = 0
    options: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}}
    for change in (lambda model: model.head.weight.data.mul_(2),
                   lambda model: torch.optim.SGD(model.parameters(), 0.1).step()):
        fresh()
        model = Net(False)
        loss, logits, _ = torch.compile(model, backend="hpml", options=options)(X, Y)
        loss.backward(retain_graph=True)
        change(model)
        with pytest.raises(HpmlError, match="modified by an inplace operation: output mul"):
            logits.sum().backward()
    fresh()
    options["outputs"] = "whole"
    loss, logits, other = torch.compile(Net(False), backend="hpml", options=options)(X, Y)
    with pytest.raises(RankDiverged, match="on rank 1, other gradients than on rank 0 arrive at output mul, sin"):
        of_both(loss, other if rank else logits).backward()


def test_stale_values_and_ranks_that_differ_are_refused(launch):
    launch(run_refused, world_size=2)
