"""A rank whose work takes three times as long -> rows, or blocks of a pipeline, move to the other one, and all results stay
those of one device, also where a gradient arrives later at an output beside the loss, and where gradients are accumulated."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpml_compiler
from benchmarks.slow_operator import register, seconds_per_row, work
from hpml_compiler.compile.balance import balanced_graph
from passes.transforms.outputs import outputs_beside_loss
from tests.helpers.frozen import fresh

ROWS, WIDTH, STEPS = 16, 8, 36
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}, "balance": "auto", "monitor": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.down(torch.tanh(self.norm(self.up(work(x)))))
        return (made - x.sin()).square().mean(), made


def train(model: nn.Module, call: Any) -> list[torch.Tensor]:
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, made = call(torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)))
        (loss + made.cos().mean() if step == STEPS - 2 else loss).backward()
        optimizer.step()
        seen.append(loss.detach())
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in (*seen, *model.state_dict().values())]


def on_ranks(rank: int) -> tuple[float, list[dict[str, Any]]]:
    register()
    fresh()
    outputs_beside_loss.LEAST_BYTES = 0
    balanced_graph.LEAST_AHEAD = 10**6  # whatever a compilation takes on this machine
    reference = Net().double()
    expected, model = train(reference, reference), Net().double()
    seconds_per_row[0] = 0.006 if rank else 0.002
    seen = train(model, torch.compile(model, backend="hpml", options=OPTIONS))
    worst = max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))
    return worst, [dict(graph.rows_by_rank) for graph in hpml_compiler.last_plan().graphs]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x
        for layer in self.layers:
            made = made + torch.tanh(layer(work(made)))
        return (made - x.sin()).square().mean()


def train_deep(model: nn.Module, call: Any, kind: str) -> list[torch.Tensor]:
    """Losses, parameters, gradients of two steps, and the optimizer's state."""
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if kind == "adamw" else torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9)
    seen = []
    for step in range(19):
        if step % 3 == 0:
            optimizer.zero_grad()
        loss = call(torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    seen += [value for p in model.parameters() for value in (p.detach(), p.grad, *optimizer.state[p].values())]
    model.eval()
    with torch.no_grad():
        seen.append(call(torch.ones(4, WIDTH, dtype=torch.float64)))
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in seen]


def in_stages(rank: int, size: int, kind: str) -> tuple[float, list[list[int]], set[Any]]:
    register()
    fresh()
    balanced_graph.LEAST_AHEAD, balanced_graph.WINDOW = 10**6, 6
    seconds_per_row[0] = 0.0
    reference, model = Deep().double(), Deep().double()
    expected = train_deep(reference, reference, kind)
    seconds_per_row[0] = 0.003 if rank < size // 2 else 0.001
    options = {**OPTIONS, "mesh": {"pp": 2, **({"dp": 2} if size == 4 else {})}, "microbatches": 2}
    seen = train_deep(model, torch.compile(model, backend="hpml", options=options), kind)
    worst = max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))
    cuts = [[len(stage.blocks) for stage in graph.pipeline.stages] for graph in hpml_compiler.last_plan().graphs
            if graph.pipeline and graph.training]
    return worst, cuts, {(p.placements, p._local_tensor.numel() > 0) for p in model.layers[2].parameters()}


@pytest.mark.parametrize(("size", "kind"), [(2, "momentum"), (4, "adamw")])
def test_blocks_move_away_from_a_slow_stage(launch, size, kind):
    for rank, (worst, (first, last), placed) in enumerate(launch(in_stages, size, (size, kind))):
        assert worst < 1e-12
        assert first == [6, 6] and sum(last) == 12 and last[0] < 6, "blocks have moved"
        ((placements, is_here),) = placed
        assert is_here == (rank >= size // 2) and placements[0].rank == 1, "so have parameters"


def test_rows_move_away_from_a_slow_rank(launch):
    for worst, rows in launch(on_ranks):
        assert worst < 1e-11
        assert len(rows) == 3, "as compiled first, with moved rows, and with a gradient at the other output"
        moved = [each["dp"] for each in rows if each]
        assert moved and all(fast + slow == ROWS and fast > slow for fast, slow in moved), rows
