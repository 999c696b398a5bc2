"""Nothing pinned and a step that does not fit -> a plan that fits, or an error with the least memory."""
from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.options import Options
from hpml_compiler.planner.joint.joint_candidate import JointCandidate
from hpml_compiler.planner.joint.open_decisions import OPEN_SCHEDULES, OpenDecisions, OpenSchedule
from hpml_compiler.planner.joint.stage_cost import LeastWork, StageCost
from hpml_compiler.simulate.simulator import simulate
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from passes.json_records import FrozenMap
from passes.pipeline.pipeline_schedule import make_schedule
from passes.pipeline.pipeline_timeline import TimedStage, simulate_pipeline
from tests.hpml_compiler.planner.test_offline_budget import EAGER
from tests.passes.traced import transformer


class Head(nn.Module):
    """Its logits are its peak."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.tokens(tokens)).flatten(0, 1), tokens.flatten())


class Wide(nn.Module):
    """Its activations take more memory than its weights."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(*sizes) for _ in range(2))
                              for sizes in ((width, 4 * width), (4 * width, width)))

    def forward(self, x, y):
        for up, down in zip(self.up, self.down):
            x = x + down(up(x).relu())
        return F.mse_loss(x, y)


class Residual(nn.Module):
    """The additions between its layers belong to no layer, so that few layers do not stand for all; two devices divide no size
    of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(15, 61), nn.ReLU(), nn.Linear(61, 15)) for _ in range(6))

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)


TOKENS = torch.arange(8 * 64).view(8, 64)
DEEP = functools.cache(lambda: transformer(512, 64, 4, 10, rows=8, length=64))


def cluster_of(nbytes: int, devices: int = 2) -> Cluster:
    made = Cluster.parse(f"1x{devices}:h100-80g")
    return Cluster((replace(made.group, device=replace(made.device, memory_bytes=nbytes)),))


def planned(nbytes: int, model=None, batch=None, devices: int = 2, **options):
    if model is None:
        model, batch = DEEP()
    return hpml_compiler.plan(model, batch, cluster=cluster_of(nbytes, devices), **EAGER, **options)


@functools.cache
def roomy() -> int:
    """Bytes of a device that has room for everything."""
    return planned(10**11).peak.bytes


def test_a_step_that_does_not_fit_is_planned_so_that_it_does():
    limit = int(0.6 * roomy())
    plan = planned(limit, mesh={"dp": 2})
    (graph,) = plan.graphs
    assert graph.memory.peak == plan.peak.bytes <= limit
    assert graph.microbatches is not None or graph.kept.again or graph.pipeline is not None
    assert graph.solver.bound <= graph.solver.cost <= graph.predicted.step_time_us
    assert graph.solver.cost == graph.solver.simulated_us == pytest.approx(simulate(plan).step_us)
    assert graph.solver.gap == pytest.approx(1 - graph.solver.bound / graph.solver.cost)
    assert (graph.solver.status == "optimal") == (graph.solver.gap <= 1e-3)
    found = plan.summary_json()
    assert 0 < found["step_bound_s"] <= found["simulated_s"] == pytest.approx(simulate(plan).step_us * 1e-6)
    gap = 1 - found["step_bound_s"] / found["simulated_s"]
    assert found["step_gap"] == pytest.approx(gap) and found["gap"] == pytest.approx(gap)
    stages = [each["stages"] for each in found["families"]]
    assert stages == sorted(set(stages)) and [each["stages"] for each in found["families"] if each["reason"] is None] == [1]
    assert all(each["bound_s"] is None or each["bound_s"] >= found["bound_s"] for each in found["families"])
    assert all(each.bound is None or each.bound >= graph.solver.bound for each in plan.rejected)
    assert all(each.cost is None or each.cost >= graph.solver.bound for each in plan.rejected)


def test_the_plan_that_fits_with_the_least_energy_is_no_dearer_than_the_fastest():
    limit = int(0.6 * roomy())
    found, fast = planned(limit, objective="energy"), planned(limit)
    solver, device_uj = found.graphs[0].solver, simulate(found).energy_j * 1e6 / 2
    assert found.peak.bytes <= limit and solver.objective == "energy"
    assert solver.cost == pytest.approx(device_uj) and solver.simulated_us == pytest.approx(simulate(found).step_us)
    assert device_uj <= simulate(fast).energy_j * 1e6 / 2 and simulate(fast).step_us <= simulate(found).step_us
    assert 0 < solver.bound <= min([solver.cost, *(each.bound for each in found.rejected if each.bound is not None)])
    assert all(each.cost is None or each.cost >= solver.cost for each in found.rejected)
    summary = found.summary_json()
    assert summary["bound_j"] == pytest.approx(2e-6 * solver.bound) and summary["bound_s"] is summary["step_bound_s"] is None
    assert min(each["cost_j"] for each in summary["families"] if each["cost_j"]) == pytest.approx(2e-6 * solver.cost)


def test_the_search_is_over_all_layers_where_a_few_do_not_represent_the_model():
    batch = torch.ones(2, 15), torch.ones(2, 15)
    limit = int(0.8 * planned(10**11, Residual(), batch).peak.bytes)
    plan = planned(limit, Residual(), batch)
    assert plan.mesh["pp"] == 2 and plan.peak.bytes <= limit


@pytest.mark.parametrize("part", [0.9, 0.6])
def test_logits_that_are_the_peak_go_through_in_microbatches(part):
    limit = int(part * planned(10**11, Head(), (TOKENS,)).peak.bytes)
    assert planned(10**11, Head(), (TOKENS,), memory_budget=limit).peak.bytes <= limit


def test_a_budget_under_which_much_is_recomputed_is_met_by_microbatches():
    with torch.device("meta"):
        model, x = Wide(2560), torch.zeros(8, 2560, 2560)
    plan = functools.partial(hpml_compiler.plan, model, (x, x), cluster="2x1:a100-40g", time_limit=2)
    limit = int(0.8 * plan().peak.bytes)
    whole, found = plan(memory_budget=limit, microbatches=1), plan(memory_budget=limit)
    assert whole.graphs[0].predicted.again_us > 0.05 * simulate(whole).step_us
    assert found.graphs[0].microbatches.count > 1 and found.peak.bytes <= limit
    assert simulate(found).step_us < simulate(whole).step_us


def test_what_fits_is_planned_as_before():
    model, batch = DEEP()
    plan = hpml_compiler.plan(model, batch, cluster="1x2:h100-80g", **EAGER)
    (graph,) = plan.graphs
    assert graph.microbatches is None and graph.kept is None and graph.pipeline is None


def test_what_fits_but_waits_for_slow_links_is_cut_into_stages():
    """Stages send each other fewer bytes than all gradients have."""
    made = Cluster.parse("2x1:h100-80g").group
    slow = replace(made.device, name="slow", peak_flops_per_s=FrozenMap({"float32": 4e9}),
                   matmul_half_dim=0.0, attention_half_dim=0.0, matmul_ramp_us=0.0, attention_ramp_us=0.0)
    cluster = Cluster((replace(made, device=slow, inter_node=replace(made.inter_node, bandwidth_bytes_per_s=3e6)),))
    model, batch = transformer(512, 128, 4, 6, rows=64, length=32)
    found, pinned = (hpml_compiler.plan(model, batch, cluster=cluster, **EAGER, **pins) for pins in ({}, {"mesh": {"dp": 2}}))
    assert found.mesh == {"pp": 2} and not pinned.mesh.keys() & {"pp"}
    assert simulate(found).step_us < 0.8 * simulate(pinned).step_us


def test_pins_stay_and_the_rest_is_decided():
    limit = int(0.6 * roomy())
    plan = planned(limit, mesh={"dp": 2}, microbatches=4)
    assert plan.mesh == {"dp": 2} and plan.graphs[0].microbatches.count == 4 and plan.peak.bytes <= limit


def test_where_nothing_fits_the_least_memory_is_told():
    with pytest.raises(Infeasible) as caught:
        planned(roomy() // 30)
    error = caught.value
    assert error.exit_code == 3 and "even if all of them are sharded over all 2" in error.what
    assert error.smallest_budget_bytes > roomy() // 30 and error.next_step


def test_decisions_that_are_open():
    def of(rows: int = 8, **options) -> OpenDecisions:
        return OpenDecisions(Options.parse(options), Cluster.parse("2x4:a100-80g"), rows)

    assert of().any and not of(microbatches=2, recompute={"*": "full"}).any and of(objective="energy").any
    assert list(of().stage_counts()) == [1, 2, 4] and list(of(mesh={"pp": 2, "dp": 4}).stage_counts()) == [2]
    assert list(of(mesh={"tp": 2}).stage_counts()) == [1, 2, 4] and of(mesh={"tp": 2}).stage_meshes(2) == [{"dp": 2, "tp": 2}]
    assert of(mesh={"pp": 2}).stage_meshes(2) == of().stage_meshes(2) and not of(mesh={"x": 2}).has_meshes
    assert of().stage_meshes(2) == [{"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 4}]
    assert of(rows=6).stage_meshes(1) == [{"dp": 2, "tp": 4}], "rows are split evenly"
    assert of().microbatch_counts({"dp": 2, "tp": 4}) == [1, 2, 4] and of(microbatches=3).microbatch_counts({}) == [3]


def test_rows_are_split_over_more_devices_than_divide_the_parameters():
    decisions = OpenDecisions(Options.parse({}), Cluster.parse("6x2:a100-80g"), 12, shapes=((16, 64), (64,)))
    assert decisions.stage_meshes(1) == [{"replica": 3, "dp": 2, "tp": 2}, {"replica": 3, "dp": 4}]
    assert decisions.microbatch_counts({"replica": 3, "dp": 2, "tp": 2}) == [1, 2]
    assert OpenDecisions(Options.parse({}), Cluster.parse("3x1:cpu"), 3, shapes=((5,),)).stage_meshes(1) == [{"dp": 3}]


def test_schedules_that_are_open():
    def of(at_once: bool = True, stages: int = 2, microbatches: int = 4, **options) -> list[str]:
        decisions = OpenDecisions(Options.parse(options), Cluster.parse("2x4:a100-80g"), 8, at_once=at_once)
        return [each.name for each in decisions.schedules(stages, microbatches)]

    assert of() == ["1f1b", "interleaved", "zero_bubble", "zbv"] and of(stages=4, microbatches=6) == [
        "1f1b", "zero_bubble", "zbv"]
    assert of(at_once=False) == ["gpipe"] and len(of(stages=1)) == 1
    decisions = OpenDecisions(Options.parse({}), Cluster.parse("2x4:a100-80g"), 8)
    assert [each.name for each in decisions.schedules(4, 8, layers=6)] == ["1f1b", "zero_bubble"], "each stage has a layer"
    assert of(mesh={"pp": 2}, schedule="zbv", virtual_stages=2) == ["zbv"]
    assert of(schedule="interleaved") == ["interleaved"] and of(schedule="interleaved", microbatches=5) == []


def test_layers_that_stages_do_not_divide_take_longer():
    cost = StageCost({}, 90.0, 0.0, 0.0, 0.0, 0.0, 0.0, compute_us=90.0, layers_us=90.0)

    def us(layers: int) -> float:
        return JointCandidate(4, cost, 1000, 1.0, least=LeastWork(layers_us=22.5, layers=layers)).us

    assert us(9) / us(8) == pytest.approx(12 / 9, rel=1e-2), "the slowest rank has 3 of 9"
    head = replace(cost, compute_us=90.0 * 9 / 8)
    assert JointCandidate(4, head, 1, 1.0, least=LeastWork(layers_us=22.5, layers=8)).us > us(8), "and one of a layer's size"


def test_a_pinned_schedule_leaves_the_number_of_stages_open():
    def of(**options) -> OpenDecisions:
        return OpenDecisions(Options.parse(options), Cluster.parse("2x4:a100-80g"), 8)

    assert list(of(schedule="1f1b").stage_counts()) == [2, 4] == list(of(mesh={"dp": 2}, virtual_stages=2).stage_counts())
    assert of(schedule="1f1b").axes_are_open and not of(mesh={"dp": 8}, schedule="1f1b").axes_are_open
    (schedule,) = of(schedule="zbv").schedules(2, 4)
    assert (schedule.name, schedule.virtual_stages) == ("zbv", 2)


def test_more_microbatches_take_fewer_bytes_and_stages_a_bubble():
    cost = StageCost({"dp": 4}, 100.0, 90.0, 10.0, 1000.0, 20.0, 5.0, 20.0, 60.0, 1.0)
    own = cost.on({"dp": 2})
    assert (own.us, own.saved_bytes, own.compute_us) == (180.0, 2000.0, 120.0), "twice the rows, and the same parameters"
    assert cost.placed and not own.placed and own.output_bytes == 10.0 and own.bound_us == 0.0
    one, four = JointCandidate(1, cost, 1, 500.0), JointCandidate(1, cost, 4, 500.0)
    assert four.bytes_with(1.0) < one.bytes_with(1.0) and four.us < one.us, "which recomputes more"
    plain, virtual, split, back = (JointCandidate(2, own, 4, 500.0, each, LeastWork(60.0)) for each in OPEN_SCHEDULES)
    assert plain.mesh == {"pp": 2, "dp": 2} and str(plain) == "2 stages in 4 microbatches (1f1b)"
    assert split.bound_us == 60.0 < virtual.bound_us < plain.bound_us <= plain.us and split.us < plain.us
    assert back.us < split.us and back.recomputes and not replace(back, limit=5000.0).recomputes
    assert str(one) == "the whole batch at once"
    near = cost.on({"dp": 2}, farther=0.5)
    assert (near.us, near.parameter_us) == (170.0, 10.0), "within a node, parameters move in half of the time"


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_no_cut_of_a_played_schedule_takes_less_than_the_bound(stages, microbatches):
    cost = StageCost({"dp": 2}, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    rng = random.Random(stages * microbatches)
    for _ in range(25):
        parts = [rng.uniform(0.5, 2.0) for _ in range(stages)]
        floor_us = microbatches * sum(parts) / stages
        for schedule in OPEN_SCHEDULES:
            table = make_schedule(schedule.name, stages, microbatches, schedule.virtual_stages)
            times = [TimedStage(us / 3, 2 * us / 3, 0.0, 0.0, weight_us=us / 3 if table.splits_backward else None)
                     for us in (parts if schedule.virtual_stages == 1 else [us / 2 for us in parts * 2])]
            bound_us = JointCandidate(stages, cost, microbatches, 0.0, schedule, LeastWork(floor_us)).bound_us
            assert bound_us <= simulate_pipeline(table, times).step_us * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_played_pipeline_that_goes_back_and_forth_takes_less(data):
    """zbv: the first and the last stage are on one rank, so that only the work of a rank is a bound."""
    ranks = data.draw(st.integers(2, 4))
    count = data.draw(st.sampled_from([2 * ranks, 3 * ranks]))
    sizes = st.one_of(st.just(1e-3), st.floats(0.1, 5.0))
    work = [data.draw(sizes) for _ in range(2 * ranks)]
    share, split = data.draw(st.floats(0.1, 0.9)), data.draw(st.floats(0.0, 1.0))
    timed = [TimedStage(share * us, (1 - share) * us, data.draw(st.sampled_from([0.0, 0.3])),
                        weight_us=split * (1 - share) * us) for us in work]
    played = simulate_pipeline(make_schedule("zbv", ranks, count, 2), timed).step_us
    candidate = JointCandidate(ranks, StageCost({}, 0.0, count * sum(work), 0.0, 0.0, 0.0, 0.0), count, 0.0,
                               OpenSchedule("zbv", 2, 0.2), LeastWork(count * sum(work) / ranks))
    assert count * sum(work) / ranks <= candidate.bound_us * (1 + 1e-9) and candidate.bound_us <= played * (1 + 1e-9)
