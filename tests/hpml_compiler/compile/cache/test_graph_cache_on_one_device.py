"""A script for one device launched again -> what was decided of its graphs is not decided again, and it computes the same."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpml_compiler
from tests.helpers.frozen import fresh
from tests.hpml_compiler.compile.cache.test_graph_cache import FOUND, assert_same, folder, listen

__all__ = ["folder"]  # a cache of its own for each test
SOLVED = {"solve", "annotate", "rewrite"}


class Deep(nn.Module):
    """Blocks with dropout, of which one is checkpointed, a buffer that forward changes, and an output besides the loss."""

    def __init__(self, inside: bool, again: bool):
        super().__init__()
        self.inside, self.again = inside, again
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
                                    for _ in range(3))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x, y):
        h = x + self.seen
        for k, block in enumerate(self.blocks):
            h = h + (checkpoint(block, h, use_reentrant=False) if self.again and k == 1 else block(h))
        with torch.no_grad():
            self.seen.add_(0.1)
        return (F.mse_loss(h, y), h) if self.inside else (h, y * 2)


def train(options: dict[str, Any], inside: bool, others: bool, again: bool):
    """Steps -> losses, gradients, and what the model holds; what the log said; the plan, and where the time went."""
    fresh()
    said = listen()
    torch.manual_seed(0)
    model = Deep(inside, again).double()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = torch.randn(16, 16).double(), torch.randn(16, 16).double()
    seen: list[torch.Tensor] = []
    for rows in (16, 16, 8):
        first, other = call(x[:rows], y[:rows])
        loss = first if inside else F.mse_loss(first, y[:rows])
        (loss + other.square().mean() if others else loss).backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    graphs = hpml_compiler.last_plan().graphs
    return ([*seen, *model.state_dict().values(), torch.rand(1)], [each for each in said if FOUND in each],
            [graph.model_dump(exclude={"seconds": True, "solver": {"seconds"}}) for graph in graphs],
            [{*graph.seconds} for graph in graphs])


CASES: dict[str, tuple[dict[str, Any], bool, bool, bool]] = {
    "a budget": ({"memory_budget": "150KB"}, True, False, True),
    "microbatches": ({"microbatches": 2}, True, False, False),
    "gradients at other outputs, which run the step once more": ({"microbatches": 4}, True, True, False),
    "a loss outside, in blocks": ({"microbatches": 2, "compile_blocks": "on"}, False, False, False),
}


def launched(rank: int, cases: dict[str, tuple[dict[str, Any], bool, bool, bool]]):
    return {name: train(*case) for name, case in cases.items()}


@pytest.mark.timeout(240)
def test_a_second_launch_decides_nothing(launch):
    (first,), (again,) = (launch(launched, 1, (CASES,), init=False) for _ in range(2))
    for name in CASES:
        (before, nothing, planned, _), (after, found, restored, seconds) = first[name], again[name]
        assert_same(after, before)
        assert not nothing and len(found) == len(seconds) == 2, name
        assert restored == planned, name
        assert all("restore" in each for each in seconds), name
        if "once more" not in name:
            assert not any(SOLVED & each for each in seconds), name


def test_another_budget_or_number_of_microbatches_is_decided_anew(launch):
    others = {"budget": ({"memory_budget": "160KB"}, True, False, True), "count": ({"microbatches": 4}, True, False, False)}
    launch(launched, 1, ({name: CASES[name] for name in ("a budget", "microbatches")},), init=False)
    (found,) = launch(launched, 1, (others,), init=False)
    assert all(not each for _, each, _, _ in found.values())
