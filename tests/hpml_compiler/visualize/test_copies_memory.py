"""A plan with `redundancy` or PowerSGD -> the memory that a rank's copies, errors and bases take."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.visualize.description.copies_memory import copy_bytes, low_rank_bytes


@pytest.mark.parametrize(("options", "copies"), [
    ({"zero": 3, "redundancy": 1}, 2 * 2), ({"zero": 3, "redundancy": 9}, 2 * 4), ({"zero": 3}, 0),
    ({"zero": 0, "redundancy": 1, "mesh": {"dp": 4}}, 0),
])
def test_bytes_of_copies(options: dict, copies: int) -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    plan = hpml_compiler.plan(model, (torch.randn(32, 64),), cluster="1x4:h100-80g", **options)
    state = 3 * 2 * 64 * 128 * 4 // 4  # AdamW's, and the parameters, of a rank
    assert copy_bytes(plan) == copies * state
    assert ("for `redundancy`" in plan.table(200)) == bool(copies)


@pytest.mark.parametrize("compress", ["powersgd:4", "bf16"])
def test_bytes_of_errors(compress: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    plan = hpml_compiler.plan(model, (torch.randn(32, 64),), cluster="2x1:h100-80g", mesh={"dp": 2}, zero=0,
                              compress={"dp": compress})
    errors, factors = 2 * 64 * 128 * 4, 2 * 4 * (64 + 128) * 4
    assert low_rank_bytes(plan) == (errors + factors) * (compress != "bf16")
    assert ("errors and bases" in plan.table(200)) == (compress != "bf16")
