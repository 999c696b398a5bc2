"""Training with compressed gradients -> an eager simulation of the same rounding on one device, and the bytes really sent."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpml_compiler
from hpml_compiler.instruments.sent_bytes import SentBytes
from tests.helpers.frozen import fresh

RANKS, ROWS, WIDTH = 4, 32, 16
X = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin()
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": RANKS}, "zero": 0, "monitor": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


Reduce = Callable[[str, list[torch.Tensor]], torch.Tensor]


def rounded(dtype: torch.dtype, to_shards: bool = False) -> Reduce:
    """The sum of the ranks' gradients, each rounded, and rounded again unless it is reduced to shards."""
    def reduce(_: str, parts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([part.to(dtype).to(part.dtype) for part in parts]).sum(0)
        return total if to_shards else total.to(dtype).to(total.dtype)
    return reduce


class PowerSgd:
    """PowerSGD with error feedback for matrices; vectors are summed."""

    def __init__(self, rank: int) -> None:
        self.rank, self.state = rank, dict[str, tuple[torch.Tensor, list[torch.Tensor]]]()

    def __call__(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if parts[0].dim() < 2:
            return torch.stack(parts).sum(0)
        first = torch.randn(parts[0].shape[1], self.rank, generator=torch.Generator().manual_seed(0), dtype=parts[0].dtype)
        basis, errors = self.state.get(name, (first, [torch.zeros_like(part) for part in parts]))
        totals = [part + error for part, error in zip(parts, errors, strict=True)]
        left = torch.linalg.qr(torch.stack([total @ basis for total in totals]).sum(0)).Q
        right = torch.stack([total.T @ left for total in totals]).sum(0)
        result = left @ right.T
        self.state[name] = right, [total - result / len(parts) for total in totals]
        return result


def simulated(reduce: Reduce, ranks: int = RANKS) -> list[float]:
    """Losses on one device, where `reduce` makes the gradient from those of the ranks' rows, and the parameters after."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        parts: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
        losses.append(float(model(X).detach()))
        for rows in X.chunk(ranks):
            optimizer.zero_grad()
            (model(rows) / ranks).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                parts[name].append(p.grad.clone())
        for name, p in model.named_parameters():
            p.grad = reduce(name, parts[name])
        optimizer.step()
    return [*losses, *(float(p.detach().norm()) for p in model.parameters())]


def trained(options: dict[str, Any]) -> tuple[list[float], int]:
    """Losses and parameters, and the bytes that this rank has sent in the last backward."""
    fresh()
    model, sent = Net().double(), SentBytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call, losses = torch.compile(model, backend="hpml", options=OPTIONS | options), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = call(X)
        sent.sent.clear()
        with sent:
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*losses, *(float(p.detach().norm()) for p in whole)], sent.total


BF16 = {"compress": {"dp": "bf16"}}
CASES: dict[str, tuple[dict[str, Any], Reduce, int]] = {
    "fp16, every axis": ({"compress": {"*": "fp16"}}, rounded(torch.float16), 4),
    "inductor": ({**BF16, "compiler": "inductor"}, rounded(torch.bfloat16), 4),
    "budget": ({**BF16, "memory_budget": "64MiB"}, rounded(torch.bfloat16), 4),
    "zero 3": ({**BF16, "zero": 3}, rounded(torch.bfloat16, to_shards=True), 4),
    "powersgd": ({"compress": {"dp": "powersgd:2"}}, PowerSgd(2), 4),
    "powersgd, inductor": ({"compress": {"dp": "powersgd:2"}, "compiler": "inductor"}, PowerSgd(2), 4),
    "powersgd, stages": ({"compress": {"dp": "powersgd:2"}, "mesh": {"pp": 2, "dp": 2}, "microbatches": 2}, PowerSgd(2), 2),
    "stages": ({**BF16, "mesh": {"pp": 2, "dp": 2}, "microbatches": 2}, rounded(torch.bfloat16), 2),
}


def on_ranks(rank: int) -> dict[str, tuple[float, int]]:
    found = {}
    for name, (options, reduce, parts) in CASES.items():
        got, sent = trained(options)
        found[name] = max(abs(a - b) for a, b in zip(got, simulated(reduce, parts), strict=True)), sent
    return found


def resumed(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses after step 2 of one run, and of another that resumes from its checkpoint of that step."""
    runs = []
    for stops in (False, True):
        fresh()
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        call = torch.compile(model, backend="hpml", options={**OPTIONS, "mesh": {"dp": 2}, "compress": {"dp": "powersgd:1"}})
        checkpointer = hpml_compiler.Checkpointer(folder, model, optimizer, background=False)
        first, losses = checkpointer.resume() if stops else 0, []
        for step in range(first, 5):
            optimizer.zero_grad()
            loss = call(X)
            loss.backward()
            optimizer.step()
            losses += [float(loss.detach())] if step >= 2 else []
            if step == 1:
                checkpointer.save(1)
        checkpointer.close()
        runs.append(losses)
    return runs[0], runs[1]


def test_a_checkpoint_has_what_was_not_sent_yet(launch, tmp_path):
    for whole, again in launch(resumed, args=(str(tmp_path / "run"),)):
        assert len(whole) == len(again) == 3
        assert max(abs(a - b) for a, b in zip(whole, again, strict=True)) < 1e-12


def test_the_sum_is_that_of_rounded_gradients(launch):
    elements = sum(p.numel() for p in Net().parameters())
    for found in launch(on_ranks, world_size=RANKS):
        assert {name: apart for name, (apart, _) in found.items() if not apart < 1e-9} == {}
        for name in ("fp16, every axis", "inductor", "budget"):
            assert found[name][1] == 2 * 3 / 4 * 2 * elements, "as an all_reduce of 16-bit numbers over a ring sends"
