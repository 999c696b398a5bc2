"""Gathers and reductions of parameters, once for a microbatch loop or in each microbatch -> the numbers of one device."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import GraphPlan
from passes.hardware.cluster import Cluster
from tests.helpers.collectives import collectives_of
from tests.helpers.frozen import fresh
from tests.helpers.peaks import least_peak
from tests.helpers.plans import plan_of_ranks
from tests.hpml_compiler.compile.test_zero import Block

WIDTH, ROWS, BLOCKS, MICROBATCHES = 192, 32, 3, 2
PARAMETERS = 6 * BLOCKS
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}, "zero": 3, "microbatches": MICROBATCHES, "costs": "roofline",
                           "optimizer": "sgd", "monitor": False}
X = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin()


class Features(nn.Module):
    """The script computes the loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(Features):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def loss_of(call: Any) -> torch.Tensor:
    out = call(X)
    return out if out.dim() == 0 else out.square().mean()


def train(model: nn.Module, call: Any, measures: bool = False) -> tuple[list[torch.Tensor], int]:
    """Losses of three steps, gradients of the first and parameters after the last; and the least peak of later ones."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), list[torch.Tensor]()

    def step() -> None:
        loss = loss_of(call)
        loss.backward()
        if not seen:
            seen.extend(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())

    for _ in range(3):
        step()
    seen += model.parameters()
    numbers = [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in seen]
    return numbers, least_peak(step, model, optimizer) if measures else 0


def run(rank: int, cases: dict[str, dict[str, Any]], measured: tuple[str, ...],
        blocks: int = BLOCKS) -> dict[str, dict[str, Any]]:
    """By case: how far it is from one device, its collectives, peaks, and decision. A case may name a kind of model, and the
    case whose plan it obeys. measured: cases whose peaks are measured."""
    found, plans = {}, dict[str, Any]()
    reference = Net(blocks).double()
    expected, _ = train(reference, reference)
    for name, options in cases.items():
        fresh()
        options = dict(options)
        model = options.pop("model", Net)(blocks).double()
        if "plan" in options:
            options["plan"] = plans[options["plan"]]
        call = torch.compile(model, backend="hpml", options=OPTIONS | options)
        numbers, peak = train(model, call, name in measured)
        calls = collectives_of(lambda call=call: loss_of(call).backward())
        plan = plans[name] = plan_of_ranks()
        said, predicted = plan.step_graphs[0].microbatches, plan.step_graphs[0].predicted
        assert said is not None and plan.peak is not None
        found[name] = {
            "apart": max(float((a - b).abs().max()) for a, b in zip(numbers, expected, strict=True)),
            "gathers": calls["all_gather_into_tensor"] + calls["all_gather_into_tensor_coalesced"],
            "reductions": calls["reduce_scatter_tensor"], "measured": peak, "peak": plan.peak.bytes,
            "gathered": said.gathered, "reduced": said.reduced,
            "us": predicted.step_time_us - predicted.again_us}
    return found


ONCE = {"gather": "once", "zero": 2}  # with level 3, it is decided by cost
CASES: dict[str, dict[str, Any]] = {
    "once": ONCE, "each": {"gather": "each"}, "auto": {},
    "each, inductor": {"gather": "each", "compiler": "inductor"}, "budget": {"memory_budget": 24_000_000},
}


def test_both_are_as_on_one_device_and_counted(launch):
    for found in launch(run, args=(CASES, ("once", "each", "budget"))):
        assert {name: row["apart"] for name, row in found.items() if not row["apart"] < 1e-9} == {}
        once, each, auto = found["once"], found["each"], found["auto"]
        assert auto["gathered"] == once["gathered"] == () and len(each["gathered"]) == PARAMETERS
        others = once["gathers"] - PARAMETERS  # of activations
        assert auto["gathers"] == once["gathers"]
        for name in ("each", "each, inductor"):  # a block's weights together, in forward and in backward
            assert found[name]["gathers"] - others == MICROBATCHES * 2 * BLOCKS, name
        assert abs(once["peak"] / once["measured"] - 1) <= 0.05, once
        assert abs(each["peak"] / each["measured"] - 1) <= 0.05, each
        budget = found["budget"]
        assert once["us"] < budget["us"] < each["us"]
        assert once["peak"] > 24_000_000 >= max(budget["peak"], budget["measured"] / 1.03)
        assert each["measured"] < once["measured"] and each["us"] > once["us"]


STAGED: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 4}
BLOCKS_OF_RANK = 4
CASES_IN_STAGES: dict[str, dict[str, Any]] = {
    "once": STAGED, "each": STAGED | {"gather": "each"},
    "loss outside": STAGED | {"gather": "each", "schedule": "zero_bubble", "model": Features, "outputs": "whole"},
    "plan": STAGED | {"plan": "each"},
}


@pytest.mark.timeout(240)
def test_stages_gather_in_each_microbatch(launch):
    found = launch(run, 4, args=(CASES_IN_STAGES, ("each",), 2 * BLOCKS_OF_RANK), timeout_s=200)
    assert {name: row["apart"] for ranks in found for name, row in ranks.items() if not row["apart"] < 1e-9} == {}
    first_stage, parameters = found[0], 6 * BLOCKS_OF_RANK
    assert first_stage["once"]["gathered"] == () and first_stage["once"]["gathers"] == parameters, "those of its own stage"
    for name in ("each", "loss outside", "plan"):  # a block's weights together, in forward and in backward
        assert len(first_stage[name]["gathered"]) == 2 * parameters
        result = name == "loss outside"  # its rows are gathered, too
        assert first_stage[name]["gathers"] - result == STAGED["microbatches"] * 2 * BLOCKS_OF_RANK, name
    once, each = first_stage["once"], first_stage["each"]
    assert each["peak"] < once["peak"] and each["us"] > once["us"]
    measured = min(ranks["each"]["measured"] for ranks in found)  # gloo's threads may hold what they reduced for a while
    assert 0.87 <= each["peak"] / measured <= 1.05, [ranks["each"] for ranks in found]


def planned_in_stages(memory_bytes: float, **options: Any) -> GraphPlan:
    """On four devices with so much memory."""
    group = Cluster.local(4, "cpu").group
    cluster = Cluster((replace(group, device=replace(group.device, memory_bytes=int(memory_bytes))),))
    options = OPTIONS | STAGED | {"monitor": True} | options
    plan = hpml_compiler.plan(Net(2 * BLOCKS_OF_RANK).double(), (X,), cluster, **options)
    assert isinstance(plan, Plan)
    return plan.graphs[0]


def test_stages_repeat_the_gathers_that_memory_does_not_hold():
    once, each = (planned_in_stages(1e9, **more) for more in (ONCE, {"gather": "each"}))
    limit = (once.memory.peak + each.memory.peak) // 2
    found = planned_in_stages(limit)
    assert found.memory.peak <= limit < once.memory.peak
    assert once.predicted.step_time_us < found.predicted.step_time_us < each.predicted.step_time_us
    assert found.microbatches and each.microbatches
    assert {*found.microbatches.gathered} < {*each.microbatches.gathered}
    assert planned_in_stages(1e9).microbatches == once.microbatches
