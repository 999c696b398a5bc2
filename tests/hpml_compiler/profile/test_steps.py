"""Profiles before -> times after; and a whole profile of a small model, whose plan then costs what its step took."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.planning.measurements import sharing_key
from hpml_compiler.profile.model import profile_model
from hpml_compiler.profile.steps import fused_kernels_us, loss_of
from passes.costs.cache import MeasurementCache
from passes.costs.measured import Measurements
from passes.machine.cluster import Cluster


def test_of_each_fused_kernel_the_median_counts_and_nothing_else():
    def event(name: str, us: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, self_cpu_time_total=us, self_device_time_total=us)

    steps = 5
    events = [event("graph_0_cpp_fused_add_0", 3.0)] * (2 * steps - 1) + [event("graph_0_cpp_fused_add_0", 1e6)]
    events += [event("triton_poi_fused_mul_1", 5.0)] * steps + [event("aten::mm", 99.0)] * steps
    assert fused_kernels_us(events, steps) == pytest.approx(2 * 3.0 + 5.0)


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: {"loss": y, "logits": y}, lambda y: (y, 1),
                                  lambda y: SimpleNamespace(loss=y)], ids=["tensor", "dict", "tuple", "object"])
def test_the_loss_is_found_in_what_a_model_returns(wrap):
    loss = torch.ones((), requires_grad=True) * 2
    assert loss_of(wrap(loss)) is loss


def test_without_a_loss_everything_that_can_be_differentiated_is_summed():
    x = torch.ones(3, requires_grad=True)
    assert loss_of((x * 2, torch.ones(2))).item() == 6.0


@pytest.mark.slow
def test_a_plan_of_a_profiled_model_costs_its_kernels_and_its_host_time(tmp_path, monkeypatch):
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
    batch = (torch.randn(128, 64),)
    before = [p.clone() for p in model.parameters()]
    with MeasurementCache() as cache:
        found = profile_model(model, batch, cache, seconds=1.0)
        kept = Measurements.load(cache, sharing_key("cpu", 1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)), "the model is not changed"
    assert found.failed == {} and kept is not None
    assert kept.operations == {key: m.median_us for key, m in found.operations.items()}
    assert kept.launch_us == found.overheads_us["launch"] and kept.tensor_us == found.overheads_us["tensor"]
    plan = hpml_compiler.plan(model, batch, Cluster.local(1, "cpu"), costs="measured")
    heavy = [op.predicted_us - kept.launch_us for op in plan.graphs[0].operations.values() if op.kind == "matmul"]
    assert len(heavy) == 5 and all(
        any(us == pytest.approx(known) for known in kept.operations.values()) for us in heavy)
    other = hpml_compiler.plan(model, batch, cluster="1x1:cpu")
    assert other.predicted.step_time_us != plan.predicted.step_time_us, "a named cluster has its own prices"
