"""A model and its batch on a mesh -> whether the plan says that every rank runs all of it, and why."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.plans.unsplit_graph import why_not_split
from tests.helpers.plans import gpt_graph


class Loss(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width + 2), nn.Tanh(), nn.Linear(width + 2, width))

    def forward(self, x):
        return self.inner(x).square().mean()


@pytest.mark.parametrize(("width", "rows", "ranks", "because"), [
    (15, 1, 2, "both ranks run all of it, because the batch has 1 row and inner.0.weight (and 3 more) cannot be split: no"),
    (15, 3, 2, "because inner.0.weight (and 3 more) cannot be split: no"),
    (13, 2, 3, "all 3 ranks run all of it, because the 2 rows of the batch cannot be divided by 3"),
    (16, 1, 2, "because the batch has 1 row and the solver found no split faster than"),
    (16, 2, 2, "because the solver found no split faster than"),
    (16, 2, 1, ""),
    (512, 65536, 2, ""),
])
def test_the_reason(width, rows, ranks, because):
    with torch.device("meta"):
        model = Loss(width)
    graph, = hpml_compiler.plan(model, (torch.empty(rows, width, device="meta"),), f"1x{ranks}:cpu",
                                mesh={"x": ranks}).graphs
    said = why_not_split(graph)
    assert because in said and bool(said) == bool(because)
    assert not said or said.startswith(f"{graph.name} is not split; ")


def test_a_part_of_it_that_is_split_is_enough():
    assert why_not_split(gpt_graph()) == ""
