"""A model and an objective before -> a plan whose times are times, and whose energy adds up, after."""
from __future__ import annotations

import json

import pytest
import torch

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.simulate.plan_prices import RepricedPlan
from hpml_compiler.simulate.simulator import simulate
from hpml_compiler.units import parse_watts
from passes.cost_model.energy_model import Power, capped_cluster, link_j
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from tests.helpers.plans import gpt_plan
from tests.hpml_compiler.instruments.energy_studies.models import mlp

CLUSTER = "2x2:a100-80g"
MESH = {"dp": 2, "tp": 2}


def gpt(layers: int = 1):
    tokens = torch.zeros(8, 16, dtype=torch.long)
    return GPT(width=64, heads=2, layers=layers, length=16), (tokens, tokens)


def planned(model_and_batch=None, **options) -> Plan:
    return hpml_compiler.plan(*(model_and_batch or mlp()), cluster=CLUSTER, gap=0.0, **options)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {objective: planned(gpt(), objective=objective, mesh=MESH) for objective in ("time", "energy")}


def test_each_objective_is_best_at_its_own_and_both_are_priced_in_both(plans):
    time, energy = plans["time"].predicted, plans["energy"].predicted
    assert time.step_time_us <= energy.step_time_us * (1 + 1e-6)
    assert energy.energy_j <= time.energy_j * (1 + 1e-6)
    assert time.energy_label == energy.energy_label == "estimated"


def test_the_objective_is_the_prediction_in_its_own_unit(plans):
    (time,), (energy,) = (plan.graphs for plan in plans.values())
    assert (time.solver.objective, energy.solver.objective) == ("time", "energy")
    assert time.solver.cost == pytest.approx(time.predicted.step_time_us, rel=1e-9)
    assert energy.solver.cost * 1e-6 * 4 == pytest.approx(energy.predicted.energy_j, rel=1e-9)
    assert energy.solver.cost > 10 * energy.predicted.step_time_us  # µJ and µs of a device of hundreds of watts


@pytest.mark.parametrize(("objective", "cap", "layers"), [("time", None, 1), ("energy", 150.0, 1), ("energy", None, 8)])
def test_the_energy_of_a_plan_follows_from_what_it_lists(objective, cap, layers):
    """Recomputed from the records alone, also where one layer is listed for many. Packing and buckets are memory traffic
    inside of a collective's time, so that the energy lies between all of that time at the power of communication, and
    all at that of memory."""
    plan = planned(gpt(layers), objective=objective, mesh=MESH, **({"power_cap": cap} if cap else {}))
    (graph,) = plan.graphs
    assert graph.graph_hash.startswith("shortened:") == (layers == 8)
    mesh = mesh_from_pin(MESH, capped_cluster(Cluster.parse(CLUSTER), cap))
    power = Power.of(mesh.device)
    kernels = sum(graph.runs(op) * op.predicted_us * power.kernel_w(op.kind) for op in graph.operations.values())
    assert sum(graph.runs(op) * op.predicted_us for op in graph.operations.values()) == pytest.approx(
        graph.predicted.compute_us)
    hops = [(move.multiplicity, hop) for move in graph.redistributions for hop in move.hops]
    links = 1e6 * sum(n * link_j(s.collective, mesh.axis(s.axis), s.bytes) for n, s in hops if s.collective != "slice")
    moving_us = sum(n * s.predicted_us for n, s in hops)
    assert moving_us == pytest.approx(graph.predicted.communication_us)
    rest = kernels + links + graph.predicted.optimizer_us * power.memory_w
    low, high = (1e-6 * 4 * (rest + moving_us * watts) for watts in (power.communication_w, power.memory_w))
    assert low * (1 - 1e-3) <= graph.predicted.energy_j <= high * (1 + 1e-3)


def test_the_energy_of_stages_follows_from_what_they_list():
    """Recomputed from the records alone: each stage on its rank, which is idle in bubbles."""
    cluster = Cluster.parse("1x4:a100-80g")
    plan = hpml_compiler.plan(*gpt(4), cluster=cluster, mesh={"pp": 4}, microbatches=4)
    (graph,), power = plan.graphs, Power.of(cluster.device)
    pipe, mesh = graph.pipeline, mesh_from_pin({"pp": 4}, cluster)
    prices = RepricedPlan(graph, MeshPrices(mesh, states=2))
    once, above_uj = {*graph.microbatches.before, *graph.microbatches.after}, 0.0
    for stage in pipe.stages:
        for name, runs in stage.operations.items():
            operation = graph.operations[name]
            us = operation.predicted_us if name in once else 4 * prices.operation_us(name, 0.25)
            above_uj += runs * us * (power.kernel_w(operation.kind) - power.idle_w)
        above_uj += 4 * (stage.send_us + stage.return_us) * (power.communication_w - power.idle_w)
        above_uj += 4e6 * sum(link_j("send_recv", mesh.axes[0], each.bytes) for each in stage.sends)
        above_uj += stage.parts["optimizer"] * (power.memory_w - power.idle_w)
    idle_uj = 4 * power.idle_w * graph.predicted.step_time_us
    assert graph.predicted.energy_j > 1e-6 * (idle_uj + above_uj)  # gradients of microbatches are added, too
    assert graph.predicted.energy_j == pytest.approx(1e-6 * (idle_uj + above_uj), rel=0.02)
    found = simulate(plan)
    assert found.energy_j == pytest.approx(graph.predicted.energy_j + 4e-6 * power.idle_w * (
        found.step_us - graph.predicted.step_time_us))


def test_a_loop_over_microbatches_takes_more_energy_than_the_batch_at_once(plans):
    found = planned(gpt(), mesh=MESH, microbatches=2)
    whole, loop = plans["time"].predicted, found.predicted
    assert loop.energy_label == "estimated" and whole.energy_j < loop.energy_j < 2 * whole.energy_j
    above_idle = [cost.energy_j - 55 * 4e-6 * cost.step_time_us for cost in (whole, loop)]
    assert above_idle[0] < above_idle[1] < 2 * above_idle[0]


def test_less_power_is_slower_and_draws_less():
    found = [planned(mesh=MESH, **({"power_cap": cap} if cap else {})) for cap in (None, "250W", 120)]
    assert [p.options.get("power_cap") for p in found] == [None, 250.0, 120.0]
    times, powers = [p.predicted.step_time_us for p in found], [p.power_w for p in found]
    assert times == sorted(times) and powers == sorted(powers, reverse=True) and powers[-1] < 120 * 1.1


@pytest.mark.parametrize("options", [{"mesh": {"pp": 2, "dp": 2}}, {"mesh": MESH}], ids=str)
def test_stages_and_microbatches_keep_to_a_cap(options):
    plan = planned(gpt(4), microbatches=2, power_cap=120.0, **options)
    found = simulate(plan)
    for energy_j, us in ((plan.predicted.energy_j, plan.predicted.step_time_us), (found.energy_j, found.step_us)):
        assert energy_j < 4e-6 * us * 121 + 0.01  # links draw more


def test_a_plan_made_for_energy_can_be_passed_back(plans):
    again = planned(gpt(), objective="energy", plan=plans["energy"])
    assert again.predicted == plans["energy"].predicted
    as_time = planned(gpt(), plan=plans["energy"])
    assert as_time.predicted.energy_j == pytest.approx(plans["energy"].predicted.energy_j)


def test_meshes_that_lost_say_in_what_they_were_dearer():
    plan = planned(objective="energy")
    assert plan.rejected and {attempt.objective for attempt in plan.rejected} == {"energy"}
    best = plan.graphs[0].solver.cost
    assert all(a.cost is None or a.cost >= best for a in plan.rejected)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_summary_has_energy_and_says_how_it_is_known(plans):
    time, energy = (plan.summary_json() for plan in plans.values())
    for found in (time, energy):
        assert found["energy_label"] == "estimated"
        assert found["energy_j"] == pytest.approx(found["power_w"] * 4 * found["step_time_s"])
    assert (time["objective"], time["bound_j"]) == ("time", None) and time["bound_s"] <= time["step_time_s"] * (1 + 1e-6)
    assert (energy["objective"], energy["bound_s"]) == ("energy", None)
    assert 0 < energy["bound_j"] <= energy["energy_j"] * (1 + 1e-6)


def test_the_table_has_a_line_of_energy_and_the_bound_in_its_unit(plans):
    lines = plans["energy"].table().splitlines()
    (line,) = [each for each in lines if each.startswith("energy")]
    assert "J a step on 4 devices" in line and "W average power each (estimated)" in line
    assert any("bound" in each and "J a device" in each for each in lines)
    assert not any(each.startswith("note") for each in lines)  # the blocks' times add up to the step's


def test_an_old_plan_loads_and_has_no_energy():
    content = json.loads(gpt_plan().to_json())
    for graph in content["graphs"]:
        for part, names in (("predicted", ("energy_j", "energy_label")), ("solver", ("objective",))):
            for name in names:
                del graph[part][name]
    old = Plan.from_json(json.dumps(content))
    summary = old.summary_json()
    assert (old.power_w, summary["energy_j"], summary["energy_label"], summary["power_w"]) == (None,) * 4
    assert summary["objective"] == "time" and "energy" not in old.table()


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "watts"), [(300, 300.0), (300.5, 300.5), ("300", 300.0), ("300W", 300.0), ("0.3 kW", 300.0),
                                              (" 250 w ", 250.0)])
def test_watts_are_read(given, watts):
    assert parse_watts(given) == watts == Options.parse({"power_cap": given}).power_cap


@pytest.mark.parametrize("given", [0, -5, "300V", "", True, [300], float("inf"), float("nan")])
def test_what_is_no_power_is_refused(given):
    with pytest.raises(BadInput, match="power_cap"):
        Options.parse({"power_cap": given})


def test_a_cap_below_what_a_device_draws_idle_is_refused():
    with pytest.raises(BadInput, match="draws 55 W idle"):
        planned(mesh=MESH, power_cap="50W")
    with pytest.raises(BadInput, match="objective"):
        Options.parse({"objective": "money"})
