"""Models before -> what planning says besides the plan."""
from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hpml_compiler


def wide_batch() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Little to hold, but a product whose operands are large while it runs."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), (torch.zeros(4096, 8),)


@pytest.mark.parametrize(("share", "warned"), [(1.0, True), (10.0, False)])
def test_a_call_that_takes_more_than_the_budget_leaves_is_warned_of(caplog, share, warned):
    (graph,) = hpml_compiler.plan(*wide_batch(), cluster="1x2:cpu").graphs
    memory = graph.memory
    held = memory.parameters + memory.gradients + memory.optimizer + memory.activations
    assert held < memory.peak
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hpml"):
        hpml_compiler.plan(*wide_batch(), cluster="1x2:cpu", memory_budget=int(held * share))
    assert any("the largest call takes" in r.message for r in caplog.records) == warned
