"""A model, a batch and unlike devices before -> shares of the rows after, priced, and simulated."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import hpml_compiler
from hpml_compiler.commands import simulate as simulate_command
from hpml_compiler.instruments.heterogeneous.share_planning import equal_rows, plan_mixed
from hpml_compiler.options import Options
from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.simulate import simulate
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster, NodeGroup
from passes.hardware.device import DeviceSheet, builtin_sheet
from passes.json_records import FrozenMap
from passes.sharding.search.mesh_search import candidate_meshes

WIDTH = 256


class Regression(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.net = nn.Sequential(*layers, *([nn.BatchNorm1d(WIDTH)] if norm else []))

    def forward(self, x, target):
        return nn.functional.mse_loss(self.net(x), target)


def batch(rows: int, device: str = "meta") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, WIDTH, device=device), torch.zeros(rows, WIDTH, device=device)


def times_as_fast(sheet: DeviceSheet, factor: float, name: str) -> DeviceSheet:
    device = sheet.device
    rates = FrozenMap({dtype: rate * factor for dtype, rate in device.peak_flops_per_s.items()})
    bandwidth = device.memory_bandwidth_bytes_per_s * factor
    return replace(sheet, device=replace(device, name=name, peak_flops_per_s=rates, memory_bandwidth_bytes_per_s=bandwidth))


CPU = builtin_sheet("cpu")
FAST_AND_SLOW = Cluster((NodeGroup.of(1, 4, times_as_fast(CPU, 3.0, "fast")), NodeGroup.of(1, 4, CPU)))
SOCKET = times_as_fast(CPU, 48.0, "socket")
GPU_AND_CPU = Cluster((NodeGroup.of(1, 1, builtin_sheet("l4-24g")), NodeGroup.of(1, 2, SOCKET)), same_node=True)
CASES = {"4 fast and 4 slow": (FAST_AND_SLOW, 2**15), "a GPU and CPUs": (GPU_AND_CPU, 2**18)}


@pytest.fixture(scope="module", params=list(CASES))
def case(request) -> tuple[Cluster, MixedPlan]:
    cluster, rows = CASES[request.param]
    found = hpml_compiler.plan(Regression(), batch(rows), cluster=cluster)
    assert isinstance(found, MixedPlan)
    return cluster, found


def test_the_slow_group_has_less_work_and_the_step_is_shorter(case):
    cluster, plan = case
    fast, slow = plan.groups
    assert fast.rows > slow.rows > 0 and fast.rows + slow.rows == plan.batch
    assert fast.rows / fast.devices > slow.rows / slow.devices
    assert plan.equal_split is not None and plan.single_group is not None
    assert plan.predicted.step_time_us < 0.75 * plan.equal_split.step_time_us
    assert plan.predicted.step_time_us < plan.single_group.step_time_us
    assert plan.estimated_bound_us <= plan.predicted.step_time_us <= 1.01 * plan.estimated_bound_us
    assert len(plan.attempts) <= 12, "each takes a plan"


def test_the_simulator_agrees_that_it_beats_the_equal_split(case):
    cluster, plan = case
    assert plan.equal_split is not None
    equal = plan_mixed(Regression(), batch(plan.batch), cluster, Options.parse({}), rows=plan.equal_split.rows)
    assert equal.predicted.step_time_us == pytest.approx(plan.equal_split.step_time_us)
    mine, theirs = simulate(plan, cluster), simulate(equal, cluster)
    assert mine.step_us < 0.75 * theirs.step_us and mine.bubble_us < theirs.bubble_us
    # A first step waits for the slowest group before the sum, and for the slowest optimizer after it.
    serial = simulate(plan, cluster, overlap=False)
    assert plan.predicted.step_time_us * (1 - 1e-6) <= serial.step_us <= 1.01 * plan.predicted.step_time_us
    assert serial.energy_j == pytest.approx(plan.energy_j, rel=0.02)


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.callback()(lambda: None)
    simulate_command.register(made)
    return made


def test_the_command_simulates_a_saved_mixed_plan(app, case, tmp_path):
    plan = case[1]
    plan.save(tmp_path / "plan.json")
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "plan.json"), "--json",
                                    "--timeline", str(tmp_path / "step.png"), "--trace", str(tmp_path / "step.json")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ranks_of_lane"] == [group.devices for group in plan.groups]
    assert found["step_us"] == pytest.approx(plan.predicted.step_time_us, rel=0.02)
    assert "rows over all groups" in CliRunner().invoke(app, ["simulate", str(tmp_path / "plan.json")]).stdout
    with pytest.raises(BadInput, match="groups have"):
        simulate(plan, "1x2:a100-80g+1x2:l4-24g")


def test_a_group_that_is_left_out_idles(case):
    cluster, plan = case
    alone = plan_mixed(Regression(), batch(plan.batch), cluster, Options.parse({}), rows=(plan.batch, 0))
    found = simulate(alone, cluster)
    assert found.bubble_us > 0 and len(found.ranks_of_lane) == 2 and found.energy_j is not None
    assert {event.lane for event in found.events} == {0}


def test_reported_times_are_those_of_plans_not_of_estimates(case):
    cluster, plan = case
    for group, nodes in zip(plan.groups, cluster.groups, strict=True):
        assert group.plan is not None
        alone = hpml_compiler.plan(Regression(), batch(group.rows), cluster=Cluster((nodes,)))
        assert alone.predicted == group.plan.predicted and alone.mesh == group.plan.mesh
    assert plan.cross.bytes == sum(4 * p.numel() for p in Regression().parameters())
    slowest_us = max(group.step_time_us for group in plan.groups)
    assert plan.predicted.step_time_us == pytest.approx(slowest_us + plan.cross.predicted_us)


def test_a_group_that_costs_more_than_it_saves_is_left_out():
    plan = hpml_compiler.plan(Regression(), batch(64), cluster="1x4:h100-80g+1x4:cpu")
    assert isinstance(plan, MixedPlan)
    assert [group.rows for group in plan.groups] == [64, 0]
    assert plan.groups[1].plan is None and "adding up gradients" in plan.groups[1].reason
    assert plan.cross.predicted_us == 0.0 and plan.single_group is not None and plan.single_group.rows == (64, 0)


def small_memory(bytes_per_device: int) -> NodeGroup:
    group = FAST_AND_SLOW.groups[0]
    return replace(group, device=replace(group.device, memory_bytes=bytes_per_device))


def test_memory_limits_a_share():
    cluster = replace(FAST_AND_SLOW, groups=(small_memory(16 * 2**20), FAST_AND_SLOW.groups[1]))
    plan = hpml_compiler.plan(Regression(), batch(2**15), cluster=cluster)
    assert isinstance(plan, MixedPlan)
    assert 0 < plan.groups[0].rows < 2**14 < plan.groups[1].rows, "the fast devices hold fewer rows"
    assert any(attempt.group == 0 and attempt.reason and "needs" in attempt.reason for attempt in plan.attempts)


def test_a_group_that_cannot_hold_the_model_is_left_out_with_the_reason():
    cluster = replace(FAST_AND_SLOW, groups=(small_memory(2**20), FAST_AND_SLOW.groups[1]))
    plan = hpml_compiler.plan(Regression(), batch(64), cluster=cluster)
    assert isinstance(plan, MixedPlan) and [group.rows for group in plan.groups] == [0, 64]
    assert "cannot hold the model" in plan.groups[0].reason and "more than its 1.00 MiB" in plan.groups[0].reason


def test_where_nothing_fits_the_error_says_so_for_each_group():
    with pytest.raises(Infeasible, match="no shares of the batch fit") as caught:
        hpml_compiler.plan(Regression(), batch(64), cluster=FAST_AND_SLOW, memory_budget="1MiB")
    assert "fast" in caught.value.where and "1x4:cpu" in caught.value.where


def test_rows_that_depend_on_each_other_are_told_of():
    told = plan_mixed(Regression(norm=True), batch(64), FAST_AND_SLOW, Options.parse({}), rows=(48, 16))
    assert len(told.notes) == 1 and "BatchNorm" in told.notes[0] and "BatchNorm" in told.table()
    assert not plan_mixed(Regression(), batch(64), FAST_AND_SLOW, Options.parse({}), rows=(48, 16)).notes


def test_weighted_by_their_shares_the_groups_gradients_are_those_of_the_batch():
    torch.manual_seed(0)
    model, rows = Regression().double(), (5, 2, 1)
    x, target = torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    whole = torch.autograd.grad(model(x, target), list(model.parameters()))
    parts = [torch.autograd.grad(model(a, b), list(model.parameters())) for a, b in zip(x.split(rows), target.split(rows))]
    for i, gradient in enumerate(whole):
        torch.testing.assert_close(sum(count / 8 * part[i] for count, part in zip(rows, parts)), gradient)


@pytest.mark.parametrize(("devices", "total", "rows"), [
    ((4, 4), 64, (32, 32)), ((1, 4), 64, (12, 52)), ((4, 4), 4, (2, 2)), ((2, 4, 2), 31, (8, 16, 7)), ((8, 1), 9, (8, 1)),
])
def test_equal_split_is_in_proportion_to_devices(devices, total, rows):
    found = equal_rows(devices, total)
    assert sum(found) == total and all(abs(a - b) <= max(devices) for a, b in zip(found, rows, strict=True))
    if all(count % size == 0 for count, size in zip(rows, devices, strict=True)):
        assert found == rows


@pytest.mark.parametrize(("options", "rows", "message"), [
    ({"mesh": {"dp": 8}}, None, "has 8 devices, the groups have"),
    ({}, (64,), "shares"),
    ({}, (60, 3), "shares"),
    ({}, (65, -1), "shares"),
])
def test_refuses(options, rows, message):
    with pytest.raises(BadInput, match=message):
        plan_mixed(Regression(), batch(64), FAST_AND_SLOW, Options.parse(options), rows=rows)


def test_a_pinned_mesh_is_that_of_each_group():
    plan = plan_mixed(Regression(), batch(64), FAST_AND_SLOW, Options.parse({"mesh": {"dp": 2, "tp": 2}}), rows=(48, 16))
    assert [group.plan and group.plan.mesh for group in plan.groups] == [{"dp": 2, "tp": 2}] * 2


def test_one_mesh_over_unlike_devices_is_refused():
    with pytest.raises(BadInput, match="2 groups of different nodes"):
        candidate_meshes(FAST_AND_SLOW, None)
