"""A step in microbatches on two ranks: the numbers of one device, and gradients that are reduced once, after the loop."""
from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.helpers.collectives import collectives_of
from tests.helpers.frozen import fresh
from tests.passes.traced import mlp, transformer

ROWS = 8


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.first(x).relu(), 0.5))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of which most are left out in some rows: a mean of the means of ranks or microbatches would be another loss."""
    torch.manual_seed(1)
    ids, labels = torch.randint(0, 64, (ROWS, 16)), torch.randint(0, 64, (ROWS, 16))
    labels[0, :14] = labels[5, 2:] = -100
    return ids, labels


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return transformer(64, 32, 4, 1, ROWS, 16)[0], tokens()


def dropped() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Dropped(), (torch.randn(ROWS, 8, dtype=torch.double),)


def layers() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return mlp(16, 32), (torch.randn(ROWS, 16, dtype=torch.double),)


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(model: nn.Module, call: Any, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Losses and gradients of two steps of two calls each, the second with other calls before the first one's backward, and
    of an evaluation; the loss is scaled, as half precision does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        torch.manual_seed(step)
        if step == 0:
            for _ in range(2):
                loss = call(*batch).square().mean()
                (loss * 4).backward()
                found.append(loss.detach())
        else:
            losses = [call(*batch).square().mean() for _ in range(2)]
            sum(losses).backward()  # pyright: ignore[reportAttributeAccessIssue]
            found += [loss.detach() for loss in losses]
        found += [whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return [*found, call(*(x[:3] for x in batch)).detach().clone()]


def apart(rank: int, cases: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, float]:
    """How far each is from one device."""
    found = {}
    for name, (make, options) in cases.items():
        fresh()
        torch.manual_seed(0)
        model, batch = make()
        model, reference = model.double(), copy.deepcopy(model).double()
        expected = train(reference, reference, batch)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "monitor": False} | options)
        got = train(model, call, batch)
        found[name] = max(float((whole(a) - b).abs().max()) for a, b in zip(got, expected, strict=True))
    return found


DP, TP = {"mesh": {"dp": 2}}, {"mesh": {"tp": 2}}
CASES = {
    "gpt, dp": (gpt, DP | {"microbatches": 4}), "gpt, tp": (gpt, TP | {"microbatches": 4}),
    "gpt": (gpt, {"microbatches": 2}), "gpt, level 3": (gpt, DP | {"microbatches": 2, "zero": 3}),
    "dropout, dp": (dropped, DP | {"microbatches": 2}), "dropout, tp": (dropped, TP | {"microbatches": 2}),
    "inductor": (layers, DP | {"microbatches": 2, "compiler": "inductor"}),
}


def test_they_mean_what_the_whole_batch_means_on_one_device(launch):
    for found in launch(apart, args=(CASES,)):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}


def reductions(rank: int, options: dict[str, Any]) -> dict[int, Counter[str]]:
    """By how many microbatches there are, what one step reduces over ranks."""
    found = {}
    for microbatches in (1, 4):
        fresh()
        model, batch = gpt()
        call = torch.compile(model, backend="hpml", options=options | {"microbatches": microbatches, "compiler": "eager",
                                                                       "monitor": False})
        call(*batch).backward()
        calls = collectives_of(lambda call=call, batch=batch: call(*batch).backward())
        found[microbatches] = Counter({name: count for name, count in calls.items() if "reduce" in name})
    return found


def test_gradients_are_added_up_in_the_loop_and_reduced_once_after_it(launch):
    for found in launch(reductions, args=(DP,)):
        assert found[4] == found[1] and found[1].total() == 1
