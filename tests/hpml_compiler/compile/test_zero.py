"""Training at each level of ZeRO -> one device's losses and parameters, and the expected gathers."""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.helpers.collectives import collectives_of
from tests.helpers.frozen import fresh

WIDTH, ROWS, BLOCKS, CALLS = 16, 8, 3, 2
PARAMETERS = 6 * BLOCKS + 2
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}, "monitor": False}
X = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin()


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """checkpointed: whether blocks are computed once more in backward; frozen: whether the first one alone is trained."""

    def __init__(self, checkpointed: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 2 * WIDTH)
        self.checkpointed = checkpointed
        if frozen:
            self.requires_grad_(False)
            self.blocks[0].requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x).square().mean()


def train(model: nn.Module, call: Any) -> tuple[list[float], list[torch.Tensor], Counter[str]]:
    """Losses and parameters of three steps of several calls each, and the calls of collectives in a fourth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []

    def step() -> None:
        for _ in range(CALLS):
            loss = call(X)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    whole = [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
    return losses[: 3 * CALLS], whole, collectives_of(step)


def at_levels(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[float, Counter[str]]]:
    """By case, how far it is from one device, and its collectives. Of the options, `model` is of the model."""
    found = {}
    for name, options in cases.items():
        fresh()
        given = options.get("model", {})
        reference, model = Net(frozen=given.get("frozen", False)).double(), Net(**given).double()
        expected = train(reference, reference)
        own = {key: value for key, value in options.items() if key != "model"}
        losses, parameters, calls = train(model, torch.compile(model, backend="hpml", options=OPTIONS | own))
        apart = [abs(a - b) for a, b in zip(losses, expected[0], strict=True)]
        apart += [float((a - b).abs().max()) for a, b in zip(parameters, expected[1], strict=True)]
        found[name] = max(apart), calls
    return found


CASES: dict[str, dict[str, Any]] = {
    "0": {"zero": 0}, "2": {"zero": 2}, "3": {"zero": 3}, "3, inductor": {"zero": 3, "compiler": "inductor"},
    "3, checkpointed": {"zero": 3, "model": {"checkpointed": True}},
    "3, budget": {"zero": 3, "memory_budget": "64MiB"},
}


def test_each_level_trains_as_one_device_does(launch):
    for found in launch(at_levels, args=(CASES,)):
        assert {name: apart for name, (apart, _) in found.items() if not apart < 1e-9} == {}
        gathers = {name: calls["all_gather_into_tensor"] + calls["all_gather_into_tensor_coalesced"]
                   for name, (_, calls) in found.items()}
        others = gathers["0"]  # of what is no parameter
        assert gathers["2"] - others == PARAMETERS, "once in a step, however many calls it has"
        for name in ("3", "3, inductor", "3, budget"):
            assert gathers[name] - others == CALLS * 2 * (BLOCKS + 1), f"{name}: each block together, and what comes after them"


def scarce(rank: int) -> tuple[int, int]:
    """Gathers of a single parameter, with a budget that is more than enough, and with the least that works."""
    options = {"zero": 3, "model": {"frozen": True}}
    with pytest.raises(Exception, match="the step needs at least") as caught:
        at_levels(rank, {"": options | {"memory_budget": "1KiB"}})
    refusal: Any = getattr(caught.value, "inner_exception", caught.value)
    cases = {nbytes: options | {"memory_budget": nbytes} for nbytes in (2**26, int(refusal.smallest_budget_bytes) + 1)}
    found = at_levels(rank, cases)  # pyright: ignore[reportArgumentType]
    assert all(apart < 1e-9 for apart, _ in found.values())
    plenty, least = (calls["all_gather_into_tensor"] for _, calls in found.values())
    return plenty, least


def test_where_bytes_are_scarce_each_parameter_is_gathered_where_it_is_read(launch):
    for plenty, least in launch(scarce):
        assert plenty < 2 * CALLS * (BLOCKS + 1) < least
