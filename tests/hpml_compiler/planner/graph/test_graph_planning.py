"""Models -> messages of the planner."""
from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.plans.from_decision.graph_record import SHORTENED
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster


def wide_batch() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Little to hold, but a product whose operands are large while it runs."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), (torch.zeros(512, 8),)


def test_a_call_that_takes_more_than_the_memory_leaves_is_planned_otherwise_or_refused():
    (graph,) = hpml_compiler.plan(*wide_batch(), cluster="1x2:cpu").graphs
    memory = graph.memory
    held = memory.parameters + memory.gradients + memory.optimizer + memory.activations
    assert held < memory.peak
    (group,) = Cluster.parse("1x2:cpu").groups

    def of_memory(nbytes: int) -> Cluster:
        return Cluster((replace(group, device=replace(group.device, memory_bytes=nbytes)),))

    assert hpml_compiler.plan(*wide_batch(), cluster=of_memory(memory.peak)).memory.peak == memory.peak
    assert hpml_compiler.plan(*wide_batch(), cluster=of_memory(held)).memory.peak <= held
    with pytest.raises(Infeasible, match="needs .* at the peak: .*, even if all of them are sharded over all 2") as refusal:
        hpml_compiler.plan(*wide_batch(), cluster=of_memory(memory.parameters))
    assert memory.parameters < refusal.value.smallest_budget_bytes <= memory.peak


@pytest.mark.parametrize("whole", [True, False], ids=["all layers traced", "shortened"])
def test_one_device_has_a_plan_too(whole):
    tokens = torch.zeros(4, 16, dtype=torch.long)
    plan = hpml_compiler.plan(GPT(width=128, heads=2, layers=6, length=16), (tokens, tokens), trace_all_layers=whole)
    assert plan.mesh == {} and plan.world_size == 1 and plan.collectives == {}
    assert plan.predicted.compute_us > 0 and plan.predicted.communication_us == 0
    assert plan.table() and plan.graphviz().source
    parameters = sum(p.bytes_whole for p in plan.graphs[0].parameters.values())
    assert plan.memory.parameters == parameters == plan.memory.gradients


class WithLoss(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize(("layers", "stages", "said"), [
    (1, 2, "of 2 stages, stage 1 .* has no parameters of its own, .*remove it from options"), (4, 2, None)])
def test_stages_that_save_no_memory_are_reported_with_a_remedy(caplog, layers, stages, said):
    with caplog.at_level(logging.WARNING, "hpml"):
        hpml_compiler.plan(WithLoss(layers), (torch.zeros(64, 64),), cluster=f"1x{stages}:cpu", mesh={"pp": stages})
    warnings = [record.getMessage() for record in caplog.records if "stage" in record.getMessage()]
    assert len(warnings) == (said is not None) and all(re.search(said, each) for each in warnings)


def test_more_stages_than_the_model_has_parts_are_refused():
    with pytest.raises(BadInput, match="fewer than 8 stages"):
        hpml_compiler.plan(WithLoss(1), (torch.zeros(64, 64),), cluster="1x8:cpu", mesh={"pp": 8})


class Chain(nn.Module):
    """Eight layers, of which the first has a parameter more. stops: code after them fails, as of a configuration that lacks a
    name."""

    def __init__(self, stops: bool = False):
        super().__init__()
        self.stops, self.layers = stops, nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
        self.layers[0].register_parameter("scale", nn.Parameter(torch.ones(64)))
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        x = x * self.layers[0].scale
        for layer in self.layers:
            x = layer(x)
        if self.stops:
            torch._dynamo.graph_break()
            x = x + self.missing
        return self.head(x).square().mean()


def test_the_first_layer_may_have_parameters_of_its_own():
    whole, few = (hpml_compiler.plan(Chain(), (torch.zeros(32, 64),), cluster="1x2:h100-80g", compiler="eager",
                                     trace_all_layers=traced) for traced in (True, False))
    assert not whole.graphs[0].graph_hash.startswith(SHORTENED) and few.graphs[0].graph_hash.startswith(SHORTENED)
    assert few.predicted.step_time_us == pytest.approx(whole.predicted.step_time_us, rel=1e-9)
    assert few.memory.parameters == whole.memory.parameters


def test_a_few_layers_whose_rest_is_not_traced_stand_for_nothing():
    plan = hpml_compiler.plan(Chain(stops=True), (torch.zeros(32, 64),), cluster="1x2:h100-80g", compiler="eager")
    (part,) = plan.unplanned
    assert "fails (AttributeError: 'Chain' object has no attribute 'missing')" in part.reason
    assert part.parameters == ("head.weight", "head.bias") and not plan.graphs[0].graph_hash.startswith(SHORTENED)
