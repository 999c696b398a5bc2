"""Plans simulated: against sums, timelines worked out on paper, bounds, and plans that a solver made."""
from __future__ import annotations

import json
import math
import time

import pytest
import torch

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.simulate import CONTENTION, Simulation, TimedStage, simulate
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from tests.helpers.plans import gpt_plan
from tests.hpml_compiler.simulate.toy import (
    ACTIVATION_BYTES,
    BACKWARD_US,
    FORWARD_US,
    GATHER_US,
    OPTIMIZER_US,
    REDUCE_US,
    WEIGHT_BYTES,
    chain_plan,
)


def parts(s) -> float:
    return s.compute_us + s.exposed_communication_us + s.bubble_us + s.optimizer_us


@pytest.fixture(scope="module", params=[True, False], ids=["whole", "shortened"])
def solved(request):
    model, tokens = GPT(width=32, heads=2, layers=8, length=8), torch.zeros(4, 8, dtype=torch.long)
    plan = hpml_compiler.plan(model, (tokens, tokens), cluster="1x4:cpu", mesh={"dp": 2, "tp": 2},
                              trace_all_layers=request.param)
    assert plan.graphs[0].graph_hash.startswith("shortened:") != request.param
    return plan


def test_one_after_another_a_step_takes_what_the_plan_predicts(solved):
    found = simulate(solved, overlap=False)
    assert found.step_us == pytest.approx(solved.predicted.step_time_us, rel=1e-6)
    assert found.communication_us == pytest.approx(solved.predicted.communication_us, rel=1e-6)
    assert found.exposed_communication_us == pytest.approx(found.communication_us, rel=1e-6)


def test_priced_anew_for_its_own_cluster_a_plan_costs_the_same(solved):
    """From the terms in it alone, whether it lists all layers or one for all."""
    found, cost = simulate(solved, solved.cluster, overlap=False), solved.predicted
    assert found.compute_us == pytest.approx(cost.compute_us, rel=1e-9)
    assert found.optimizer_us == pytest.approx(cost.optimizer_us, rel=1e-9)
    assert found.communication_us == pytest.approx(cost.communication_us, rel=1e-9)


def test_overlap_never_costs_and_a_faster_device_is_never_slower(solved):
    serial = simulate(solved, overlap=False).step_us
    steps = [simulate(solved, contention=c).step_us for c in (1.0, 1.5, 2.0)]
    assert steps == sorted(steps)
    assert steps[-1] <= serial * (1 + 1e-9)
    assert simulate(solved, "1x4:h100-80g").step_us < simulate(solved, "1x4:a100-40g").step_us < serial


def test_memory_is_near_what_the_plan_holds(solved):
    """Less than the plan's own sum, which counts all activations and all gradients at once, and the largest transient."""
    memory, peak = solved.memory, simulate(solved).peak_bytes
    assert memory.parameters + memory.optimizer + max(memory.gradients, memory.activations) < peak < 1.05 * memory.peak


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"microbatches": 4}, {"overlap": False},
                                     {"recompute": "full", "microbatches": 2, "contention": 1.0}])
def test_the_breakdown_sums_to_the_step_and_streams_do_one_thing_at_a_time(solved, options):
    found = simulate(solved, **options)
    assert math.isclose(parts(found), found.step_us, rel_tol=1e-9)
    for stream in ("compute", "communication"):
        own = [e for e in found.events if e.stream == stream]
        assert all(a.stop_us <= b.start_us + 1e-6 for a, b in zip(own, own[1:]))
    assert json.loads(found.to_json())["step_us"] == found.step_us


@pytest.mark.parametrize("listed", [8, 2, 1])
def test_hand_made_plans_take_what_they_say(listed):
    plan = gpt_plan(8, listed)
    assert simulate(plan, overlap=False).step_us == pytest.approx(plan.predicted.step_time_us)


@pytest.mark.parametrize("options", [{"overlap": False}, {}, {"recompute": "full"}, {"microbatches": 2}])
def test_one_layer_listed_for_many_is_simulated_as_all_of_them(options):
    whole, short = (simulate(chain_plan(6, listed=listed), **options) for listed in (None, 1))
    assert short.step_us == pytest.approx(whole.step_us)
    assert short.communication_us == pytest.approx(whole.communication_us)
    assert len(short.events) == len(whole.events)
    if "recompute" not in options:
        assert short.peak_bytes == whole.peak_bytes


def test_gathers_are_prefetched_one_block_ahead_and_reductions_hide_behind_backward():
    """3 layers, contention 1. The first gather is exposed; those after run beside the layer before. Backward takes
    B = 10 + 10 per layer; each reduction (6) runs beside the next layer's backward, the last is exposed."""
    found = simulate(chain_plan(3), contention=1.0)
    last_compute = GATHER_US + 3 * FORWARD_US + 3 * BACKWARD_US
    assert found.step_us == pytest.approx(last_compute + REDUCE_US + OPTIMIZER_US)
    assert found.exposed_communication_us == pytest.approx(GATHER_US + REDUCE_US)
    gathers = [e for e in found.events if e.kind == "all_gather"]
    assert [e.start_us for e in gathers[:3]] == [0, GATHER_US, GATHER_US + FORWARD_US]


def test_small_gradients_share_a_bucket():
    """Weights of 4 MiB fill a bucket each; of a model with small ones, all go in one."""
    count = len([e for e in simulate(chain_plan(4)).events if e.kind == "reduce_scatter"])
    assert count == 4
    plan = gpt_plan(4)  # gradients of 1 KiB
    assert len([e for e in simulate(plan).events if "grad" in e.name and e.kind == "all_reduce"]) == 1


@pytest.mark.parametrize("contention", [1.0, 1.19, 2.0])
def test_no_bound_is_beaten(contention):
    found = simulate(chain_plan(5), contention=contention)
    work = found.compute_us + found.optimizer_us
    assert max(work, found.communication_us) <= found.step_us <= work + found.communication_us + 1e-9
    if contention == 2.0:
        assert found.step_us == pytest.approx(work + found.communication_us)


def test_recompute_runs_forward_and_its_collectives_once_more():
    plan = chain_plan(4)
    once, twice = simulate(plan, overlap=False), simulate(plan, overlap=False, recompute="full")
    assert twice.step_us - once.step_us == pytest.approx(4 * (FORWARD_US + GATHER_US))
    assert {e.kind for e in twice.events} >= {"forward", "recompute", "backward"}


def test_microbatches_repeat_all_but_reductions_and_optimizer():
    """Without a cluster that can be read, times go with the rows; gathers of weights do not shrink."""
    plan = chain_plan(4).model_copy(update={"cluster": None})
    found = simulate(plan, overlap=False, microbatches=5)
    assert found.compute_us == pytest.approx(4 * (FORWARD_US + BACKWARD_US))
    assert found.communication_us == pytest.approx(4 * (5 * 2 * GATHER_US + REDUCE_US))
    assert found.optimizer_us == OPTIMIZER_US
    assert found.energy_j is None


def test_smaller_microbatches_hold_less_and_lose_efficiency():
    """Their gradients are there twice: the sum, and those of the microbatch that backward returns."""
    plan = chain_plan(6, sharded=False)
    one, four = simulate(plan), simulate(plan, microbatches=4)
    saved = [max(nbytes for _, nbytes in each.parts["saved"]) for each in (one, four)]
    assert saved[1] == saved[0] / 4 == 6 * ACTIVATION_BYTES / 4
    assert max(nbytes for _, nbytes in four.parts["gradients"]) == 2 * 6 * WEIGHT_BYTES
    assert four.compute_us > one.compute_us


def before_the_optimizer(found: Simulation) -> int:
    """Peak of forward and backward."""
    return max(nbytes for us, nbytes in found.memory if us < found.step_us - OPTIMIZER_US - 1e-6)


def in_forward(found: Simulation, layers: int, weight_bytes: int = WEIGHT_BYTES) -> list[int]:
    """Bytes besides parameters and optimizer, while forward runs."""
    return [nbytes - 3 * layers * weight_bytes for us, nbytes in found.memory if us < layers * FORWARD_US]


def test_saved_activations_are_held_from_forward_to_backward():
    """Replicated weights: at the end of forward all saved activations are there, at the end of backward all gradients."""
    layers = 5
    found = simulate(chain_plan(layers, sharded=False))
    assert in_forward(found, layers)[-1] == layers * ACTIVATION_BYTES
    # When the last gradient is made, the first layer's activation is there, and the two gradients of activations.
    assert 0 <= before_the_optimizer(found) - 4 * layers * WEIGHT_BYTES <= 3 * ACTIVATION_BYTES
    assert found.memory[-1][1] == 3 * layers * WEIGHT_BYTES, "gradients go with the step"


def test_activations_weigh_less_as_gradients_come():
    """In backward each layer frees its activation and makes its gradient: the peak is no sum of both."""
    plan = chain_plan(6, sharded=False)
    graph = plan.graphs[0]
    large = {name: op.model_copy(update={"result_bytes": (WEIGHT_BYTES,)}) if name.startswith("fwd") else op
             for name, op in graph.operations.items()}
    found = simulate(plan.model_copy(update={"graphs": (graph.model_copy(update={"operations": large}),)}))
    assert 3 * 6 * WEIGHT_BYTES + 6 * WEIGHT_BYTES < before_the_optimizer(found) < 3 * 6 * WEIGHT_BYTES + 8 * WEIGHT_BYTES


def test_what_is_not_saved_is_dropped_and_made_again():
    kept, dropped = (in_forward(simulate(chain_plan(8, sharded=False, saved=saved)), 8)[-1] for saved in (True, False))
    assert kept - dropped >= 5 * ACTIVATION_BYTES


@pytest.mark.parametrize(("cluster", "parameters"), [("1x2:h100-80g", 4), ("1x2:cpu", 3)])
def test_the_optimizer_makes_tensors_of_its_own(cluster, parameters):
    """Like all four parameters at once on CUDA, three like one parameter elsewhere; on top of what is there at that time."""
    found = simulate(chain_plan(4, sharded=False), cluster)
    assert found.peak_bytes == (4 * 4 + parameters) * WEIGHT_BYTES


def test_tangents_live_until_they_are_read():
    plan = chain_plan(3, sharded=False)
    graph = plan.graphs[0].model_copy(update={"tangents": {"seed": 50 * WEIGHT_BYTES, "unused": 0}})
    found = simulate(plan.model_copy(update={"graphs": (graph,)}))
    assert found.peak_bytes >= 3 * 3 * WEIGHT_BYTES + 50 * WEIGHT_BYTES
    assert found.memory[-1][1] == 3 * 3 * WEIGHT_BYTES


def test_gathered_weights_and_whole_gradients_count_while_they_live():
    """At most two gathered copies (one in use, one prefetched), and a gradient beyond its shard while it is reduced."""
    found = simulate(chain_plan(6), contention=1.0)
    assert 2 * WEIGHT_BYTES <= max(in_forward(found, 6, WEIGHT_BYTES // 2)) <= 2 * WEIGHT_BYTES + 8 * ACTIVATION_BYTES
    over = before_the_optimizer(found) - 4 * 6 * WEIGHT_BYTES // 2
    assert 0 < over <= 3 * WEIGHT_BYTES + 8 * ACTIVATION_BYTES


def test_what_forward_returns_is_gathered_and_held_by_the_caller():
    """A result that is gathered to be returned, as logits are: counted from its gather to the end of backward."""
    plan = chain_plan(3, sharded=False)
    graph = plan.graphs[0]
    gather = graph.redistributions[0].model_copy(update={
        "value": "fwd2", "source": ("S(0)",), "target": ("R",), "consumer": "",
        "hops": (graph.redistributions[0].hops[0].model_copy(update={"collective": "all_gather", "predicted_us": 7.0}),)})
    more = plan.model_copy(update={"graphs": (graph.model_copy(update={
        "redistributions": (*graph.redistributions, gather)}),)})
    before, after = simulate(plan, contention=1.0), simulate(more, contention=1.0)
    assert before_the_optimizer(after) - before_the_optimizer(before) == WEIGHT_BYTES  # of the shape that the move names
    assert after.step_us - before.step_us == pytest.approx(7)


def test_energy_is_power_by_time():
    """h100-80g: 70 W idle; matrix products at 700 W; the rest by the shares in passes/cost_model/energy_model.py."""
    from passes.cost_model.energy_model import Power, link_j
    from passes.hardware.mesh import mesh_from_pin

    plan = chain_plan(3, sharded=False)
    found, cluster = simulate(plan), Cluster.parse("1x2:h100-80g")
    power, mesh = Power.of(cluster.device), mesh_from_pin({"dp": 2}, cluster)
    above_idle = (630 * found.compute_us + (power.memory_w - 70) * found.optimizer_us
                  + (power.communication_w - 70) * found.communication_us)
    links = 3 * link_j("all_reduce", mesh.axes[0], WEIGHT_BYTES)
    assert found.energy_j == pytest.approx(2 * (70 * found.step_us + above_idle) * 1e-6 + 2 * links)
    assert found.energy_label == "estimated"


def test_ranks_that_do_the_same_are_simulated_once():
    """4,096 ranks: as many events as on 2, in under 10 s (in fact a fraction of one)."""
    plan = chain_plan(24)
    large = plan.model_copy(update={"world_size": 4096, "mesh": {"dp": 4096}, "cluster": "512x8:h100-80g"})
    large = large.model_copy(update={"graphs": tuple(g.model_copy(update={"mesh": {"dp": 4096}}) for g in plan.graphs)})
    began = time.perf_counter()
    found = simulate(large, "512x8:h100-80g")
    assert time.perf_counter() - began < 10
    assert len(found.events) == len(simulate(plan).events)
    assert found.ranks_of_lane == (tuple(range(4096)),)
    assert found.communication_us > simulate(plan, "1x2:h100-80g").communication_us


def test_stages_are_lanes_that_share_the_ranks():
    plan = gpt_plan(2)  # 8 ranks
    stage = TimedStage(10, 20, activation_bytes=1e6)
    found = simulate(plan, stages=[stage] * 4, microbatches=8)
    assert [len(ranks) for ranks in found.ranks_of_lane] == [2] * 4
    assert found.bubble_us / found.compute_us == pytest.approx(3 / 8)
    assert found.peak_bytes == 4e6
    halves = [TimedStage(5, 10)] * 8
    assert simulate(plan, stages=halves, microbatches=8, virtual_stages=2).bubble_us == pytest.approx(found.bubble_us / 2)


def test_a_cost_model_is_asked_where_one_is_given():
    class Flat:
        def compute_us(self, flops, bytes_moved, dtype, kind):
            return 1.0

        def collective_us(self, kind, axis, nbytes):
            return 2.0

        def optimizer_us(self, elements):
            return 3.0

    found = simulate(chain_plan(4, sharded=False), cost=Flat(), overlap=False)
    assert (found.compute_us, found.communication_us, found.optimizer_us) == (12.0, 8.0, 12.0)


@pytest.mark.parametrize("options", [
    {"microbatches": 0}, {"recompute": "some"}, {"contention": 3.0}, {"cluster": "1x3:cpu"}, {"stages": [TimedStage(1, 1)] * 3},
    {"stages": [TimedStage(1, 1)] * 2, "virtual_stages": 2, "schedule": "gpipe"}, {"cluster": "no such thing"},
])
def test_what_does_not_fit_is_refused(options):
    with pytest.raises(BadInput):
        simulate(chain_plan(2), **options)


def test_contention_is_in_range_for_every_kind_of_device():
    assert set(CONTENTION) == {"cpu", "cuda"}
    assert all(1 <= factor <= 2 for factor in CONTENTION.values())
