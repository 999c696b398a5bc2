"""A byte budget on one device and on two: measured memory stays below it, and results equal those without."""
from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.runtime.optimizer.resident_memory import storage_bytes
from tests.helpers.frozen import fresh
from tests.helpers.peaks import least_peak

WIDTH, ROWS = 64, 512


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Deep(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(options: dict[str, Any] | None, dropout: float = 0.0, kind: Callable[[float], nn.Module] = Deep,
            ) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and parameters of three steps, and the peak bytes of the last; features have their loss outside."""
    fresh()
    model = kind(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = torch.compile(model, backend="hpml", options=options)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin()
    torch.manual_seed(1)
    seen = []
    for step in range(3):
        profile = StepProfile("cpu") if step == 2 else None
        out = call(x)
        loss = out.square().mean() if out.dim() else out
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())] if profile is None else []
        optimizer.step()
        optimizer.zero_grad()
    state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
    peak = profile.stop(storage_bytes([*model.parameters(), *state])).peak_bytes
    return [*seen, *(p.detach().clone() for p in model.parameters())], peak


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def check(compiler: str, dropout: float, *shares: float, kind: Callable[[float], nn.Module] = Deep) -> None:
    expected, unbounded = trained({"compiler": compiler}, dropout, kind)
    for share in shares:
        budget = int(share * unbounded)
        numbers, peak = trained({"compiler": compiler, "memory_budget": budget}, dropout, kind)
        assert peak <= 1.03 * budget, f"{peak / budget:.3f} of the budget, {share} of what is held without"
        assert equal(numbers, expected)


def test_a_step_stays_below_its_budget_with_the_same_numbers_bit_for_bit():
    check("eager", 0.2, 0.9, 0.75)


def test_a_step_stays_below_its_budget_where_inductor_draws_the_masks():
    check("inductor", 0.2, 0.8)


class Convolving(nn.Module):
    """Inductor has the weights, and what is computed, in another order of dims than the script."""

    def __init__(self, dropout: float):
        super().__init__()
        torch.manual_seed(0)
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
            for before in (2, 64, 64))
        self.last = nn.Sequential(nn.Conv2d(128, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())

    def forward(self, x):
        x = skip = self.levels[0](x.view(4, 2, 64, 64))
        for level in self.levels[1:]:
            x = level(F.max_pool2d(x, 2))
        return self.last(torch.cat([F.interpolate(x, scale_factor=4.0), skip], 1)).square().mean()


def test_convolutions_stay_below_their_budget_with_inductor():
    check("inductor", 0.0, 0.92, kind=Convolving)  # with several threads, what pooling needs in backward is not fused


class Chains(nn.Module):
    """Chains of light operations, drawn by chance, between convolutions: gates that several kernels read, and a gradient that
    begins with one number for all elements."""

    def __init__(self, dropout: float, channels: int = 16, blocks: int = 4):
        super().__init__()
        torch.manual_seed(0)
        draw = random.Random(3)
        self.first = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.chains = [draw.choices([F.gelu, F.relu, torch.tanh, F.silu, torch.sigmoid], k=2) for _ in range(blocks)]

    def forward(self, x):
        x = self.first(x.view(4, 2, 64, 64))
        for block, (one, other) in zip(self.blocks, self.chains, strict=True):
            y = block(x)
            x = x + one(y) * other(x)
        return x.square().mean()


def test_chains_of_light_kernels_stay_below_their_budget_as_they_are_counted():
    """What inductor fuses, writes and copies is what is counted."""
    _, unbounded = trained({}, kind=Chains)
    budget = int(0.9 * unbounded)
    _, peak = trained({"memory_budget": budget}, kind=Chains)
    assert peak <= 1.03 * budget
    assert hpml_compiler.last_plan().peak.bytes == pytest.approx(peak, rel=0.05)


def test_a_budget_that_nothing_meets_is_refused_with_what_works():
    with pytest.raises(Exception, match="the step needs at least .* parameters and optimizer state .*gradients") as caught:
        trained({"compiler": "eager", "memory_budget": "1MiB"})
    smallest = int(re.search(r"memory_budget to (\d+) bytes", str(caught.value))[1])
    assert caught.value.inner_exception.smallest_budget_bytes == smallest
    _, peak = trained({"compiler": "eager", "memory_budget": smallest})
    assert peak <= 1.03 * smallest


def test_graphs_of_one_step_share_the_budget(caplog):
    class Broken(Deep):
        def forward(self, x):
            for block in self.blocks[:2]:
                x = block(x)
            torch._dynamo.graph_break()
            for block in self.blocks[2:]:
                x = block(x)
            return x.square().mean()

    fresh()
    model = Broken()
    with caplog.at_level(logging.INFO, "hpml"):
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "memory_budget": "64MiB"})
        call(torch.ones(ROWS, WIDTH)).backward()
    kept = [record.message for record in caplog.records if "are saved for backward" in record.message]
    assert len(kept) == 2


def two_ranks(rank: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], str, int]:
    """Losses, what was logged, and the bytes that the last step held at most."""
    stream, handler = [], logging.Handler()
    handler.emit = lambda record: stream.append(record.getMessage())
    logging.getLogger("hpml").addHandler(handler)
    logging.getLogger("hpml").setLevel(logging.INFO)
    model = Deep(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}, **options})
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin()
    losses = []

    def step() -> None:
        loss = call(x)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peak = least_peak(step, model, optimizer)
    fresh()
    return losses, "\n".join(stream), peak


def in_turn(rank: int, cases: list[dict[str, Any]]) -> list[tuple[list[torch.Tensor], str, int]]:
    return [two_ranks(rank, options) for options in cases]


def test_two_ranks_keep_less_under_a_budget_with_the_same_losses(launch):
    meshes: list[dict[str, Any]] = [{"mesh": {"dp": 2}}, {"mesh": {"tp": 2}}]
    without = launch(in_turn, args=(meshes,))
    budgets = [int(0.8 * peak) for _, _, peak in without[0]]
    below = launch(in_turn, args=([mesh | {"memory_budget": most} for mesh, most in zip(meshes, budgets, strict=True)],))
    for ranks_without, ranks_below in zip(without, below, strict=True):
        for (expected, _, _), (losses, _, peak), budget in zip(ranks_without, ranks_below, budgets, strict=True):
            assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(expected, losses, strict=True))
            assert peak <= 1.03 * budget
    for _, log, _ in below[0]:
        assert "are saved for backward" in log and " 0 calls are recomputed" not in log


def refused(rank: int) -> str:
    with pytest.raises(Exception, match="the step needs at least") as caught:
        two_ranks(rank, {"memory_budget": "2MiB", "time_limit": 4.0, "microbatches": 1})
    fresh()
    return str(caught.value)


def test_a_budget_that_nothing_meets_is_refused_on_all_ranks(launch):
    first, second = launch(refused)
    assert "more devices" in first and "more devices" in second
