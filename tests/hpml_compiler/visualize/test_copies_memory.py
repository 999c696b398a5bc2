"""A plan with `redundancy` or PowerSGD -> the memory that a rank's copies, errors and bases take."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.visualize.description.copies_memory import copy_bytes, low_rank_bytes
from passes.errors import Infeasible


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


@pytest.mark.parametrize(("options", "copied"), [({"mesh": {"dp": 2}, "zero": 3}, 2 * 2), ({"mesh": {"dp": 2}, "zero": 0}, 0),
                                                 ({"mesh": {"pp": 2}, "zero": 0}, 2 * 2)])
def test_copies_count_in_the_memory_of_a_cpu(options: dict, copied: int) -> None:
    def planned(**others: Any) -> hpml_compiler.Plan:
        layers = [each for _ in range(4)
                  for each in (nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False))]
        return hpml_compiler.plan(nn.Sequential(*layers), (torch.randn(512, 64),), cluster="1x2:cpu", microbatches=1,
                                  **options, **others)

    alone, redundant = planned(), planned(redundancy=9)  # as 1, on two ranks
    copies = copied * (alone.memory.parameters + alone.memory.optimizer)
    assert redundant.memory.copies == copies and redundant.memory.peak == alone.memory.peak + copies
    assert ("per rank included, for `redundancy`" in redundant.table(200)) == bool(copies) and copy_bytes(redundant) == copies
    met = planned(redundancy=1, memory_budget=round(0.8 * alone.memory.peak) + copies)
    assert met.memory.peak <= 0.8 * alone.memory.peak + copies and met.graphs[0].predicted.again_us > 0
    if copies:
        with pytest.raises(Infeasible, match=r"copies (of these )?\d"):
            planned(redundancy=1, memory_budget=alone.memory.peak)


@pytest.mark.parametrize("compress", ["powersgd:4", "bf16"])
def test_bytes_of_errors(compress: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    plan = hpml_compiler.plan(model, (torch.randn(32, 64),), cluster="2x1:h100-80g", mesh={"dp": 2}, zero=0,
                              compress={"dp": compress})
    errors, factors = 2 * 64 * 128 * 4, 2 * 4 * (64 + 128) * 4
    assert low_rank_bytes(plan) == (errors + factors) * (compress != "bf16")
    assert ("errors and bases" in plan.table(200)) == (compress != "bf16")
