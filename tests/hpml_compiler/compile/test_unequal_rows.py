"""Unequal numbers of rows per rank -> losses, metrics, gradients' norms, parameters and buffers of one device."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.instruments.heterogeneous.share_planning import plan_mixed
from hpml_compiler.options import Options
from passes.hardware.cluster import Cluster, NodeGroup
from tests.helpers.frozen import fresh
from tests.hpml_compiler.instruments.heterogeneous import test_share_planning as shares

WORDS, WIDTH, LENGTH, IGNORED = 24, 16, 6, 3
TOLERANCE = 1e-12


class Net(nn.Module):
    """Attention over positions, BatchNorm over rows, dropout, and a mean over tokens that are not masked."""

    def __init__(self, mixes_rows: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(LENGTH) if mixes_rows else nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        rows, length = tokens.shape
        x = self.batch_norm(self.embedding(tokens) + self.place(torch.arange(length)))
        q, k, v = self.qkv(x).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        logits = self.head(x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))))
        return logits if labels is None else (loss_of(logits, labels), logits)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def train(model: Net, call: Any, rows: int, outside: bool, give: Any = lambda batch: batch) -> list[torch.Tensor]:
    """All that a script sees of two steps and an evaluation. outside: the script computes the loss."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    torch.manual_seed(1)
    for step in range(2):
        drawn = torch.randint(0, WORDS, (2, rows, LENGTH), generator=torch.Generator().manual_seed(step))
        tokens, labels = give((drawn[0], drawn[1]))
        logits = call(tokens) if outside else None
        loss, logits = (loss_of(logits, labels), logits) if logits is not None else call(tokens, labels)
        loss.backward()
        accuracy = (logits.argmax(-1) == labels).double().mean()
        seen += [loss.detach(), accuracy, nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen.append(call(tokens))
    seen += model.state_dict().values()
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in seen]


def on_ranks(rank: int, cases: dict[str, tuple[int, dict[str, Any], str]]) -> dict[str, Any]:
    """By case, the greatest difference from one device, and the rows in the plan."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, (rows, options, how) in cases.items():
        fresh()
        mixes_rows = options.get("microbatches", 1) == 1
        reference, model = Net(mixes_rows), Net(mixes_rows)
        expected = train(reference, reference, rows, "outside" in how)
        give = (lambda batch: hpml_compiler.distribute_batch(batch, rows="same")) if "distributed" in how else lambda x: x
        options = {"compiler": "eager", "monitor": False, **options}
        seen = train(model, torch.compile(model, backend="hpml", options=options), rows, "outside" in how, give)
        worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(seen, expected, strict=True))
        graph, table = hpml_compiler.last_plan().graphs[0], hpml_compiler.last_plan().table(120)
        assert f"rows {'+'.join(map(str, graph.rows_by_rank['dp']))}" in table
        kept = [graph.kept] if graph.pipeline is None else [stage.kept for stage in graph.pipeline.stages]
        if {"memory_budget", "recompute"} & {*options}:
            assert any(each.again for each in kept if each is not None), name
        found[name] = worst, dict(graph.rows_by_rank), any(
            "S(0)" in layout for each in graph.operations.values() for layout in each.outputs)
    return found


@pytest.mark.parametrize("world, cases", [
    (2, {
        "7 + 1, loss outside": (8, {"mesh": {"dp": 2}, "rows": {"dp": [7, 1]}}, "outside"),
        "6 + 2, microbatches": (
            8, {"mesh": {"dp": 2}, "rows": {"dp": [6, 2]}, "microbatches": 2, "memory_budget": 150_000}, ""),
        "3 + 5, ZeRO-3, distributed": (8, {"mesh": {"dp": 2}, "rows": {"dp": [3, 5]}, "zero": 3}, "distributed"),
    }),
    (4, {
        "5 + 3, tp": (8, {"mesh": {"dp": 2, "tp": 2}, "rows": {"dp": [5, 3]}}, "outside distributed"),
        "4 + 2, stages": (6, {"mesh": {"pp": 2, "dp": 2}, "rows": {"dp": [4, 2]}, "microbatches": 2, "recompute": "full"}, ""),
        "2 + 6, stages": (8, {"mesh": {"pp": 2, "dp": 2}, "rows": {"dp": [2, 6]}, "memory_budget": 130_000}, ""),
        "3 + 3 + 2 + 2": (10, {"mesh": {"dp": 4}, "zero": 2}, ""),
    }),
], ids=["2 ranks", "4 ranks"])
def test_unequal_rows_train_as_one_device(launch, world, cases):
    for found in launch(on_ranks, world_size=world, args=(cases,)):
        for name, (worst, rows, is_split) in found.items():
            assert worst <= TOLERANCE, (name, worst)
            assert "+".join(map(str, rows["dp"])) == name.split(",")[0].replace(" ", "") and is_split, name


def mixed_plan_on_ranks(rank: int, path: str) -> tuple[float, dict[str, tuple[int, ...]]]:
    """The greatest difference from one device, and the rows in the plan of the run."""
    torch.set_default_dtype(torch.float64)
    fresh()
    torch.manual_seed(0)
    reference = shares.Regression()
    model, seen = copy.deepcopy(reference), []
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "monitor": False, "plan": path})
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.3)
        for step in range(3):
            x = torch.randn(96, shares.WIDTH, generator=torch.Generator().manual_seed(step))
            loss = (each if each is reference else call)(x, x.sin())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
    worst = max(float((a - b).abs()) for a, b in zip(seen[:3], seen[3:], strict=True))
    return worst, dict(hpml_compiler.last_plan().graphs[0].rows_by_rank)


def test_a_plan_for_unlike_devices_runs_on_as_many_ranks(launch, tmp_path):
    cpu = shares.times_as_fast(shares.CPU, 0.5, "slow")
    unlike = Cluster((NodeGroup.of(1, 1, shares.CPU), NodeGroup.of(1, 1, cpu)), same_node=True)
    plan = plan_mixed(shares.Regression(), shares.batch(6144), unlike, Options.parse({}), rows=(4096, 2048))
    plan.save(tmp_path / "plan.json")
    times = [group.step_time_us for group in plan.groups]
    assert times[0] == pytest.approx(times[1], rel=0.05), "half as many rows on a device that is half as fast"
    for worst, found in launch(mixed_plan_on_ranks, args=(str(tmp_path / "plan.json"),)):
        assert worst < TOLERANCE and found == {"dp": (64, 32)}
