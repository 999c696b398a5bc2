"""A model that breaks between logits and loss -> its second graph is planned with the logits as the first leaves them."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpml_compiler


class Broken(nn.Module):
    def __init__(self, breaks: bool, view: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.breaks, self.view = nn.Linear(16, 64), nn.Linear(64, 512), breaks, view

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.body(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        if self.view:  # 4095 rows of 3 parts: a shard of 8 is no row of this view
            logits = logits.view(-1, 3, 512).mean(1)
        return F.cross_entropy(logits, y)


def collectives(model, rows, **options):
    """Shapes of the values of each graph that are sent whole or in part, with the collectives."""
    targets = rows // 3 if model.view else rows
    planned = hpml_compiler.plan(model, (torch.randn(rows, 16), torch.zeros(targets, dtype=torch.long)),
                                 cluster="1x8:a100-80g", **options)
    return [{(r.shape, hop.collective) for r in graph.redistributions for hop in r.hops if hop.collective != "slice"}
            for graph in planned.graphs]


@pytest.mark.parametrize(("mesh", "loss"), [
    ({"dp": 8}, {((), "all_reduce")}),  # each device has the loss of its rows
    ({"tp": 8}, {((), "all_reduce"), ((4096, 1), "all_reduce")}),  # and here of its part of the vocabulary
])
def test_the_loss_is_computed_from_sharded_logits(mesh, loss):
    first, second = collectives(Broken(True), 4096, mesh=mesh)
    assert second == loss
    assert not [shape for shape, _ in first if shape == (4096, 512)]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_break_costs_no_collective_along_rows(microbatches):
    broken, whole = (collectives(Broken(breaks), 4096, mesh={"dp": 8}, microbatches=microbatches) for breaks in (True, False))
    assert set().union(*broken) == whole[0]


def test_logits_are_whole_where_asked_or_where_their_shards_fit_no_view():
    assert ((4096, 512), "all_gather") in collectives(Broken(True), 4096, mesh={"dp": 8}, outputs="whole")[0]
    first, second = collectives(Broken(True, view=True), 4104, mesh={"dp": 8})
    assert ((4104, 512), "all_gather") not in first | second
    assert not [shape for shape, _ in second if shape]
