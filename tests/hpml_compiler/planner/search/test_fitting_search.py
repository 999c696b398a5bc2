"""Plans of every kind -> one count of bytes that is reported everywhere, and that decides whether a plan fits."""
from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from tests.hpml_compiler.planner.figures import check_figures


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """Repeated blocks between a table and a head; returns its logits, too, if asked to, whose gradient is zeros."""

    def __init__(self, layers: int = 2, logits: bool = False):
        super().__init__()
        self.table, self.head, self.logits = nn.Embedding(64, 32), nn.Linear(32, 512), logits
        self.blocks = nn.ModuleList(Block(32) for _ in range(layers))

    def forward(self, x, y):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return (loss, logits) if self.logits else loss


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, 2, 1)

    def forward(self, x, y):
        return F.cross_entropy(self.two(F.relu(self.norm(self.one(x)))).mean((2, 3)), y)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(16, 16, dtype=torch.long), torch.zeros(16, 16, dtype=torch.long)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)


CASES = {
    "one device": (Blocks, tokens, "1x1:cpu", {}),
    "folded": (lambda: Blocks(8), tokens, "1x2:a100-80g", {}),
    "tp": (Blocks, tokens, "1x2:cpu", {"mesh": {"tp": 2}}),
    "zero 3": (Blocks, tokens, "1x2:a100-80g", {"mesh": {"dp": 2}, "zero": 3}),
    "optimizer elsewhere": (Blocks, tokens, "1x2:cpu", {"mesh": {"dp": 2}, "offload": "optimizer"}),
    "sgd": (Blocks, tokens, "1x2:cpu", {"mesh": {"dp": 2}, "optimizer": "sgd"}),
    "microbatches": (Blocks, tokens, "1x2:cpu", {"mesh": {"dp": 2}, "microbatches": 4}),
    "stages": (Blocks, tokens, "1x2:a100-80g", {"mesh": {"pp": 2}, "microbatches": 4}),
    "interleaved": (lambda: Blocks(4), tokens, "1x4:a100-80g",
                    {"mesh": {"pp": 2, "tp": 2}, "microbatches": 4, "virtual_stages": 2}),
    "zero bubble": (Blocks, tokens, "1x2:a100-80g", {"mesh": {"pp": 2}, "microbatches": 4, "schedule": "zero_bubble"}),
    "budget": (Blocks, tokens, "1x2:cpu", {"mesh": {"dp": 2}, "memory_budget": "3MiB"}),
    "logits": (lambda: Blocks(1, logits=True), tokens, "1x2:cpu", {"mesh": {"dp": 2}}),
    "convolutions": (Convolutions, images, "1x2:cpu", {}),
}


def planned(case: str, memory_bytes: int | None = None, **more):
    model, batch, cluster, options = CASES[case]
    made = Cluster.parse(cluster)
    if memory_bytes is not None:
        made = Cluster((replace(made.group, device=replace(made.device, memory_bytes=memory_bytes)),))
    return hpml_compiler.plan(model(), batch(), cluster=made, **{**options, **more})


as_it_is = functools.cache(planned)


@pytest.mark.parametrize("case", CASES)
def test_figures_of_a_plan_agree(case):
    plan = as_it_is(case)
    check_figures(plan)
    memory = plan.step_graphs[0].memory
    assert plan.peak.bytes >= memory.parameters + memory.optimizer
    assert (plan.predicted.again_us > 0) == ("recomputation" in plan.table(200)) == (case == "budget")


@pytest.mark.parametrize("case", ["zero 3", "stages", "budget", "convolutions"])
def test_a_device_of_the_peak_is_enough_and_one_of_a_twentieth_is_refused(case):
    peak = as_it_is(case).peak.bytes
    assert planned(case, peak).memory.peak <= peak
    with pytest.raises(Infeasible) as refusal:
        planned(case, peak // 20)
    assert refusal.value.exit_code == 3 and refusal.value.next_step and "B" in refusal.value.what


@pytest.mark.parametrize("case", ["convolutions", "logits"])
def test_a_peak_that_is_told_is_a_budget_that_is_met(case):
    make, batch, _, _ = CASES[case]

    def peak(**options) -> int:
        return hpml_compiler.plan(make(), batch(), cluster="1x1:cpu", **options).peak.bytes

    latest = peak(memory_budget="1GiB")
    for _ in range(2):
        told = peak(memory_budget=latest)
        assert told <= latest
        latest = told
    with pytest.raises(Infeasible) as refusal:
        peak(memory_budget=latest // 10)
    least = round(refusal.value.smallest_budget_bytes)
    assert peak(memory_budget=least) <= least


def test_a_budget_above_the_memory_of_a_device_is_that_memory():
    wide = planned("convolutions", memory_budget="1GiB").peak.bytes
    assert planned("convolutions", int(0.9 * wide), memory_budget="1GiB").peak.bytes <= int(0.9 * wide)
