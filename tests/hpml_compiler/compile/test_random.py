"""Models that draw random numbers -> on two ranks the numbers of one device, and the generator where that leaves it.

With inductor, each rank and each microbatch draws its part of them.
"""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes import compat
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import full

MESHES = ({"dp": 2}, {"tp": 2})  # one for each case, in turn
X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16).sin()


class Between(nn.Module):
    """Two layers, with something that draws in between."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32).double(), nn.Linear(32, 4).double()
        self.draw = copy.deepcopy(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.draw(self.up(x)))


def heads(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1, 1, 4, 8).transpose(0, 1)


def by_head(h: torch.Tensor) -> torch.Tensor:
    """Attention between pairs of rows, with four heads, each of eight columns."""
    q = h.view(-1, 2, 4, 8).transpose(1, 2)
    return (F.dropout((q @ q.mT).softmax(-1), 0.3) @ q).transpose(1, 2).reshape(-1, 32)


def in_a_checkpoint(h: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: F.dropout(t.sin(), 0.3) * torch.rand_like(t), h, use_reentrant=False)  # type: ignore[return-value]


def broken(h: torch.Tensor) -> torch.Tensor:
    h = F.dropout(h, 0.2)
    torch._dynamo.graph_break()
    return F.dropout(h, 0.2)


DRAWS = {
    "dropout": nn.Dropout(0.3),
    "normal": lambda h: h + 0.1 * torch.randn_like(h) + torch.randn(32).double(),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "several": lambda h: F.dropout(F.dropout(h, 0.3) + torch.rand_like(h), 0.2),
    "of a shape alone": lambda h: 0.5 * h + 0.1 * torch.randn_like(h),  # backward reads neither
    "transposed": lambda h: h + torch.rand_like(h.t()).t(),
    "multinomial": lambda h: h[:, torch.multinomial(h.detach().abs().mean(0) + 0.1, 32, replacement=True)],
    "rrelu": nn.RReLU(),
    "gumbel": lambda h: h * F.gumbel_softmax(h, dim=-1, hard=True),
    "alpha dropout": nn.AlphaDropout(0.2),
    "channels": lambda h: F.dropout2d(h.view(-1, 8, 2, 2), 0.4).view(-1, 32),
    "order": lambda h: h[:, torch.randperm(32)],
    "in place": lambda h: h + torch.empty_like(h).exponential_() + torch.empty_like(h).uniform_(-1, 1).bernoulli_(0.4),
    "attention": lambda h: F.scaled_dot_product_attention(heads(h), heads(h), heads(h), dropout_p=0.3).reshape(-1, 32),
    "checkpoint": in_a_checkpoint,
    "two graphs": broken,
    "by head": by_head,
}


def script(draw: Any, compile_: Any, other_rows: bool) -> list[torch.Tensor]:
    """Training steps, other rows and evaluation if asked; and what the script itself draws in between."""
    fresh()
    torch.manual_seed(0)
    model = Between(draw)
    call, optimizer = compile_(model), torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for rows in (8, 8, 4) if other_rows else (8, 8):
        out = call(X[:rows])
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        seen += [out.detach(), torch.randn(2)]
    model.eval()
    if other_rows:
        with torch.no_grad():
            seen += [call(X[:6])]
    return [*seen, *(full(p).detach() for p in model.parameters()), torch.get_rng_state().double()]


@contextlib.contextmanager
def numbers_drawn() -> Iterator[list[torch.Size]]:
    """The sizes of random numbers that inductor's graphs compute from their positions."""
    lower, found = compat.compile_with_inductor, []

    def noted(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        found.extend(node.meta["val"].shape for node in gm.graph.nodes if node.target == compat.RANDOM_AT)
        return lower(gm, *args, **kwargs)

    with patch.object(compat, "compile_with_inductor", noted):
        yield found


def same_numbers(rank, compiler, cases):
    """cases: by name of what draws, options, and the sizes of the numbers that one call of a graph draws at their positions."""
    for name, (given, sizes) in cases.items():
        draw = DRAWS[name]
        other_rows = compiler == "eager"  # inductor takes long, and numbers do not depend on the rows
        one = script(draw, lambda m: m if compiler == "eager" else torch.compile(m, backend="inductor"), other_rows)
        options = {"compiler": compiler, **given}
        with numbers_drawn() as drawn:
            split = script(draw, lambda m, options=options: torch.compile(m, backend="hpml", options=options), other_rows)
        assert {*map(tuple, drawn)} == sizes, name
        for position, (a, b) in enumerate(zip(split, one, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda text, at=(name, position): f"{at}: {text}")
        states = [torch.empty_like(split[-1]) for _ in range(2)]
        dist.all_gather(states, split[-1])
        assert torch.equal(*states), name


@pytest.mark.timeout(200)
def test_uncompiled_numbers(launch):
    cases = {name: ({"mesh": mesh}, set()) for name, mesh in zip(DRAWS, cycle(MESHES))}
    launch(same_numbers, args=("eager", cases), timeout_s=190)


@pytest.mark.timeout(260)
@pytest.mark.slow
def test_inductors_numbers(launch):
    launch(same_numbers, args=("inductor", {
        "several": ({"mesh": {"dp": 2}, "microbatches": 2}, {(2, 32)}),
        "by head": ({"mesh": {"tp": 2}, "recompute": "full"}, {(4, 2, 2, 2)}),
        "normal": ({"mesh": {"tp": 2}}, {(8, 16), (16,)}),
    }), timeout_s=240)
