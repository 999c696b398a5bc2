"""Gathers and reductions of parameters, once for a microbatch loop or in each microbatch -> the numbers of one device."""
from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpml_compiler.session import session
from tests.helpers.frozen import fresh
from tests.helpers.peaks import least_peak
from tests.hpml_compiler.compile.test_zero import Block

WIDTH, ROWS, BLOCKS, MICROBATCHES = 192, 32, 3, 2
PARAMETERS = 6 * BLOCKS
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}, "zero": 3, "microbatches": MICROBATCHES, "costs": "roofline",
                           "optimizer": "sgd", "monitor": False}
X = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(model: nn.Module, call: Any) -> tuple[list[torch.Tensor], int]:
    """Losses of six steps, gradients of the first and parameters after the last, and the least peak of the latter three."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), list[torch.Tensor]()

    def step() -> None:
        loss = call(X)
        loss.backward()
        if not seen:
            seen.extend(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())

    for _ in range(3):
        step()
    peak = least_peak(step, model, optimizer)
    seen += model.parameters()
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in seen], peak


def run(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By case: how far it is from one device, its collectives, peaks, and decision."""
    found = {}
    reference = Net().double()
    expected, _ = train(reference, reference)
    for name, options in cases.items():
        fresh()
        model = Net().double()
        call = torch.compile(model, backend="hpml", options=OPTIONS | options)
        numbers, measured = train(model, call)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call(X).backward()
        calls = Counter({event.key.split("::")[1]: event.count for event in profile.key_averages()
                         if "c10d_functional" in event.key})
        plan = session.last_plan()
        said, predicted = plan.step_graphs[0].microbatches, plan.step_graphs[0].predicted
        assert said is not None
        found[name] = {
            "apart": max(float((a - b).abs().max()) for a, b in zip(numbers, expected, strict=True)),
            "gathers": calls["all_gather_into_tensor"] + calls["all_gather_into_tensor_coalesced"],
            "reductions": calls["reduce_scatter_tensor"], "measured": measured, "peak": plan.peak.bytes,
            "gathered": said.gathered, "reduced": said.reduced,
            "us": predicted.step_time_us - predicted.again_us}
    return found


CASES: dict[str, dict[str, Any]] = {
    "once": {"gather": "once"}, "each": {"gather": "each"}, "auto": {},
    "each, next launch": {"gather": "each"}, "each, inductor": {"gather": "each", "compiler": "inductor"},
    "budget": {"memory_budget": 24_000_000},
}


def test_both_are_as_on_one_device_and_counted(launch):
    for found in launch(run, args=(CASES,)):
        assert {name: row["apart"] for name, row in found.items() if not row["apart"] < 1e-9} == {}
        once, each, auto = found["once"], found["each"], found["auto"]
        assert auto["gathered"] == once["gathered"] == () and len(each["gathered"]) == PARAMETERS
        others = once["gathers"] - PARAMETERS  # of activations
        assert auto["gathers"] == once["gathers"]
        for name in ("each", "each, next launch", "each, inductor"):  # a block's weights together, in forward and in backward
            assert found[name]["gathers"] - others == MICROBATCHES * 2 * BLOCKS, name
        assert abs(once["peak"] / once["measured"] - 1) <= 0.05, once
        # Without a budget, a plan counts workspace of gathers that run ahead: more than gloo has here, where layers are small.
        assert 0.8 <= each["peak"] / each["measured"] <= 1.4, each
        budget = found["budget"]
        assert once["us"] < budget["us"] < each["us"]
        assert once["peak"] > 24_000_000 >= max(budget["peak"], budget["measured"] / 1.03)
        assert each["measured"] < once["measured"] and each["us"] > once["us"]
