"""One step, one count: the plan's table and JSON, `explain --memory`, the simulation and the monitor name the same bytes."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.commands.plan import peak_of
from hpml_compiler.demo.train import GPT
from hpml_compiler.monitor.prediction import expected_parts
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.plan_assembly import step_peak_bytes
from hpml_compiler.simulate import simulate
from hpml_compiler.visualize.memory_explanation import memory_json


def gpt():
    tokens = torch.zeros(8, 16, dtype=torch.long)
    return GPT(width=32, heads=2, layers=3, length=16), (tokens, tokens)


def convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 64, 10)), (torch.randn(8, 3, 8, 8),)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.float64, 128)])
def test_scratch_of_convolutions_is_counted_with_and_without_a_budget(dtype, rows):
    """The backward of a convolution on a CPU needs twice the bytes of its weight, or in float64 those that its kernels see for
    each element."""
    model = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(128 * 4, 1)).to(dtype)
    weight = dtype.itemsize * model[0].weight.numel()
    options = {"optimizer": "sgd", "compiler": "eager"}
    without, within = (hpml_compiler.plan(model, (torch.randn(rows, 128, 2, 2, dtype=dtype),), "1x1:cpu", **options, **budget)
                       for budget in ({}, {"memory_budget": "1GiB"}))
    assert 4 * weight < without.peak.bytes == pytest.approx(within.peak.bytes, rel=0.01)
    assert without.peak.node == within.peak.node == "convolution_backward"


@pytest.mark.parametrize(("make", "mesh", "options", "share"), [
    (gpt, {}, {}, None), (gpt, {"dp": 2}, {"trace_all_layers": True}, 0.9), (gpt, {"tp": 2}, {"microbatches": 2}, None),
    (gpt, {"tp": 2}, {"microbatches": 2}, 2.0), (gpt, {"pp": 2}, {}, None), (gpt, {"pp": 2}, {"microbatches": 2}, 1.2),
    (convolutions, {"dp": 2}, {}, None), (convolutions, {}, {}, 2.0),
])
def test_all_reports_name_the_same_bytes(make, mesh, options, share):
    """share: the budget, as a part of the peak without one."""
    model, batch = make()
    options = {**options, **({"mesh": mesh} if mesh else {})}
    devices = f"1x{2 if mesh else 1}:cpu"
    plan = hpml_compiler.plan(model, batch, devices, **options)
    if share is not None:
        plan = hpml_compiler.plan(model, batch, devices, memory_budget=int(share * plan.memory.peak), **options)
    assert plan.peak.counted == (share is not None or "pp" in mesh)
    for each in (plan, Plan.from_json(plan.to_json())):
        played = simulate(each)
        assert each.memory.peak == each.peak.bytes == played.peak_bytes == max(nbytes for _, nbytes in played.memory)
        assert memory_json(each, peak_of(each))["peak_bytes"] == each.peak.bytes
        predicted = step_peak_bytes(each.step_graphs, Options.parse(options), each.hardware)
        assert sum(expected_parts(each.step_graphs, predicted).values()) == each.peak.bytes
        times = [us for us, _ in played.memory]
        assert times == sorted(times) and times[-1] == played.step_us
        parts = [{part: curve[k][1] for part, curve in played.parts.items() if curve[k][1]} for k in range(len(times))]
        assert [sum(each.values()) for each in parts] == [nbytes for _, nbytes in played.memory]
        assert plan.peak.parts in parts
