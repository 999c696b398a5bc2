"""More different calls than Dynamo compiles for before -> right results, and one warning that the plan is gone. More modules of
a class, compiled one by one -> all are planned."""
from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpml_compiler.session import session
from passes.session_state import state


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), ""

    def forward(self, x):
        return self.linear(x) * len(self.factor)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record):
        self.said.append(record.getMessage())


def run_many(rank):
    kept = Kept()
    logging.getLogger("hpml").addHandler(kept)
    torch._dynamo.config.recompile_limit = 2
    model, x = Scaled(), torch.ones(2, 4)
    options: Any = {"compiler": "eager", "mesh": {"tp": 2}}
    call = torch.compile(model, backend="hpml", options=options)
    call(x).sum().backward()
    for length in (2, 3, 4, 5):
        model.factor = "x" * length
        torch.testing.assert_close(call(x), model.linear(x) * length)
    said = [line for line in kept.said if "reached Dynamo's recompile limit" in line]
    assert len(session.current().graphs) == 2 and len(said) == 1
    for part in ("'forward' (", "after 2 compilations", "factor == 'xx'", "raise torch._dynamo.config.recompile_limit"):
        assert part in said[0], said[0]


class Link(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(Link() for _ in range(5)))


def run_one_by_one(rank):
    kept = Kept()
    logging.getLogger("hpml").addHandler(kept)
    torch._dynamo.config.recompile_limit = 2
    ours, theirs = chain(), chain()
    for link in ours:
        link.compile(backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}, "zero": 3})
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert not [line for line in kept.said if "recompile limit" in line]
    assert len(session.current().graphs) == len(ours)
    state.close()
    assert torch._dynamo.config.recompile_limit == 2


def test_blocks_that_are_compiled_one_by_one_are_all_planned(launch):
    launch(run_one_by_one)


@pytest.mark.timeout(130)
def test_a_plan_that_dynamo_drops_is_said(launch):
    launch(run_many, world_size=2, timeout_s=120)
