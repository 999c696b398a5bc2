"""A memory budget that is too small -> the least that the refusal names is met: with the loss in the model or in the script."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from passes.errors import Infeasible
from tests.helpers.frozen import fresh

STAGES = {"mesh": {"pp": 2}, "microbatches": 2}
ALONE: dict[str, tuple[dict[str, Any], bool]] = {
    "microbatches, loss inside": ({"microbatches": 2}, True),
    "microbatches, loss outside": ({"microbatches": 2}, False),
    "chunks, loss outside": ({"loss_chunks": 4}, False),
}
ON_RANKS: dict[str, tuple[dict[str, Any], bool]] = {
    "stages, loss inside": (STAGES, True),
    "stages, loss outside": (STAGES, False),
    "two stages a rank": ({**STAGES, "schedule": "interleaved", "virtual_stages": 2}, True),
}


class Net(nn.Module):
    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 512))
        self.has_loss = has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum() if self.has_loss else self.layers(x)


def train(options: dict[str, Any], has_loss: bool) -> None:
    fresh()
    call = torch.compile(model := Net(has_loss), backend="hpml", options={"compiler": "eager", **options})
    for _ in range(2):
        result = call(torch.ones(64, 64))
        (result if has_loss else result.sum()).backward()
        model.zero_grad()


def least_of(options: dict[str, Any], has_loss: bool) -> float:
    """The budget that the refusal of a tiny one names, after steps under it."""
    with pytest.raises(Exception) as raised:
        train({**options, "memory_budget": 1}, has_loss)
    refusal = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(refusal, Infeasible), refusal
    least = refusal.smallest_budget_bytes
    assert least is not None and f"set memory_budget to {int(least)} bytes" in refusal.next_step
    train({**options, "memory_budget": int(least)}, has_loss)
    return least


@pytest.mark.parametrize("case", ALONE)
def test_one_device_meets_it(case):
    least_of(*ALONE[case])


@pytest.mark.parametrize(("budget", "graph"), [(1, "first"), (900_000, "second")])
def test_a_graph_break_is_told_since_the_other_graph_may_need_more(budget, graph):
    fresh()
    first, second = Net(False).layers[:2], Net(False).layers[2:]

    def model(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x).sum()

    options = {"compiler": "eager", "memory_budget": budget}
    with pytest.raises(Exception, match="other graphs of the step, which a graph break separates, may need more") as raised:
        torch.compile(model, backend="hpml", options=options)(torch.ones(512, 64))
    assert ("saved by" in str(raised.value)) == (graph == "second")


def on_ranks(rank: int) -> list[float]:
    return [least_of(*each) for each in ON_RANKS.values()]


def test_ranks_meet_it(launch):
    one, other = launch(on_ranks, 2)
    assert one == other
