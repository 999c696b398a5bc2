"""A budget below the batch's activations and above a microbatch's -> a plan that fits."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin

ROWS, WIDTH = 4096, 64
SAVED = 8 * ROWS * WIDTH * 4
"""Bytes of what four layers save of a batch: what goes into each matmul and each tanh."""


class Net(nn.Module):
    def __init__(self, inside: bool = True):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.inside = inside

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y) if self.inside else x


def cluster(memory_bytes: int) -> Cluster:
    made = Cluster.parse("1x2:a100-80g")
    group = replace(made.group, device=replace(made.device, memory_bytes=memory_bytes))
    return Cluster((group,))


def planned(memory_bytes, microbatches, inside=True):
    x = torch.randn(ROWS, WIDTH)
    return hpml_compiler.plan(Net(inside), (x, x), cluster=cluster(memory_bytes),
                              mesh={"dp": 2}, microbatches=microbatches)


def test_saved_values_of_one_microbatch_count():
    memory_bytes = SAVED // 4  # a rank has half the rows
    with pytest.raises(Infeasible):
        planned(memory_bytes, 1)
    (graph,) = planned(memory_bytes, 8).graphs
    assert graph.microbatches is not None and graph.microbatches.count == 8
    assert graph.memory.peak < memory_bytes


def test_with_the_loss_outside_all_of_them_count():
    with pytest.raises(Infeasible):
        planned(SAVED // 8, 8, inside=False)


@pytest.mark.parametrize("microbatches", [1, 8])
def test_the_peak_that_is_told_is_enough_and_what_is_refused_tells_another(microbatches):
    told = planned(2 * SAVED, microbatches).memory.peak
    assert planned(told, microbatches).memory.peak <= told
    with pytest.raises(Infeasible, match="a device needs .*, more than its") as refusal:
        planned(told // 50, microbatches)
    least = round(refusal.value.smallest_budget_bytes)
    assert told // 50 < planned(least, microbatches).memory.peak <= least
    assert refusal.value.plan.peak.bytes == least


class Wide(nn.Module):
    """Its weights are larger than its activations, so that these are redistributed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(4)])

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def test_a_microbatch_redistributes_its_own_rows():
    x = torch.randn(512, 4096)
    steps = []
    for count in (1, 4):
        (graph,) = hpml_compiler.plan(Wide(), (x, x), cluster="1x2:a100-80g", mesh={"tp": 2}, microbatches=count).graphs
        step = step_graph(graph, PlannedPrices(graph, RepricedPlan(graph, MeshPrices(mesh_from_pin(
            graph.mesh, Cluster.parse("1x2:a100-80g")), 2))))
        steps.append([leg for leg in step.legs if leg.communicates and not leg.gradient])
    whole, part = steps
    assert whole and [leg.result_bytes for leg in part] == [leg.result_bytes / 4 for leg in whole]
    assert all(sum(hop.us for hop in one.hops) < sum(hop.us for hop in each.hops) for one, each in zip(part, whole))
