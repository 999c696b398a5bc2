"""Plans and the graphs run in a step -> predicted time by class, and bytes."""
from __future__ import annotations

import pytest

import hpml_compiler
from hpml_compiler.monitor.kernel_classes import CLASSES
from hpml_compiler.monitor.prediction import GraphRuns, expected, graph_cost
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.plan_assembly import step_peak_bytes
from passes.hardware.cluster import Cluster
from tests.helpers.plans import gpt_graph


def of(plans, *runs):
    return expected(plans, [graph_cost(plan) for plan in plans], [GraphRuns(*each) for each in runs])


@pytest.fixture(scope="module", params=[False, True], ids=["shortened", "whole"])
def plan(request):
    """Of a model with many equal layers, of which a shortened plan lists one."""
    import torch

    from hpml_compiler.demo.train import GPT

    tokens = torch.zeros(4, 16, dtype=torch.long)
    made = hpml_compiler.plan(GPT(width=32, heads=2, layers=8, length=16), (tokens, tokens), cluster="1x4:cpu",
                              mesh={"dp": 2, "tp": 2}, trace_all_layers=request.param)
    assert made.graphs[0].graph_hash.startswith("shortened:") != request.param
    return made.graphs[0]


def test_one_forward_and_backward_is_the_plan_s_own_prediction(plan):
    found = of([plan], (0, 1, 1))
    assert found.step_us == pytest.approx(plan.predicted.step_time_us)
    assert found.classes_us["optimizer"] == pytest.approx(plan.predicted.optimizer_us)
    assert found.classes_us["collective"] == pytest.approx(plan.predicted.communication_us, rel=0.02)
    assert sum(found.classes_us.values()) == pytest.approx(found.step_us)
    assert tuple(found.classes_us) == CLASSES
    assert found.classes_us["matmul"] > 0 and found.classes_us["attention"] > 0 and found.classes_us["overhead"] == 0
    assert found.peak_bytes == sum(found.parts_bytes.values()) == plan.memory.peak == plan.at_peak.bytes
    assert found.parts_bytes["optimizer"] == plan.memory.optimizer


def test_accumulated_gradients_are_one_optimizer_step(plan):
    one, four = of([plan], (0, 1, 1)), of([plan], (0, 4, 4))
    optimizer = plan.predicted.optimizer_us
    assert four.step_us - optimizer == pytest.approx(4 * (one.step_us - optimizer))
    assert four.classes_us["matmul"] == pytest.approx(4 * one.classes_us["matmul"])
    missing = plan.memory.gradients - plan.at_peak.parts.get("gradients", 0)
    assert four.peak_bytes == plan.memory.peak + missing, "all gradients are there in the backward parts after the first"
    assert one.peak_bytes == pytest.approx(four.peak_bytes, rel=0.3)


def test_forward_alone_is_less_than_half_of_both(plan):
    """Backward has two matrix products for each one of forward."""
    forward, both = of([plan], (0, 1, 0)), of([plan], (0, 1, 1))
    assert forward.classes_us["matmul"] == pytest.approx(both.classes_us["matmul"] / 3, rel=0.1)
    assert forward.classes_us["optimizer"] == 0
    assert forward.step_us < both.step_us / 2


def test_known_answer():
    """Three layers: 2 + 3 * 3 us of pointwise calls and 3 * 20 + 20 us of products forward, 3 * 10 us backward, 3 * 5 us of
    collectives each way, by hand."""
    cost = graph_cost(gpt_graph(layers=3))
    assert cost.forward_us == pytest.approx({"pointwise": 2 + 3 * 3, "matmul": 3 * 20 + 20, "collective": 15, "overhead": 0})
    assert cost.backward_us == pytest.approx({"matmul": 30, "collective": 15, "overhead": 0})
    assert graph_cost(gpt_graph(layers=3, listed=1)) == cost
    assert cost.calls_us(GraphRuns(0, 1, 1)) == pytest.approx(22 + 48 * 3 - 5 * 3)
    assert cost.calls_us(GraphRuns(0, 0, 1)) == pytest.approx((22 + 48 * 3 - 5 * 3) * 45 / (91 + 15 + 45))


def test_calls_take_the_overhead_that_was_measured():
    graph = gpt_graph(layers=3)
    slower = graph.model_copy(update={"predicted": graph.predicted.model_copy(update={"overhead_us": 8.0})})
    cost = graph_cost(slower)
    assert cost.forward_us["overhead"] == cost.backward_us["overhead"] == 4.0


def test_graphs_of_one_model_share_its_optimizer_and_parameters():
    """Two batch sizes in one step: two graphs with the same parameters."""
    def counted(plans) -> int:
        return step_peak_bytes(plans, Options(), Cluster.parse("1x8:cpu"))

    graphs, runs = [gpt_graph()] * 2, [GraphRuns(0, 1, 1), GraphRuns(1, 1, 1)]
    one, two = (expected(graphs, [graph_cost(each) for each in graphs], runs[:n], counted) for n in (1, 2))
    assert two.classes_us["optimizer"] == pytest.approx(one.classes_us["optimizer"])
    assert two.parts_bytes["parameters"] == one.parts_bytes["parameters"]
    assert two.peak_bytes == counted(graphs) == sum(two.parts_bytes.values()) > one.peak_bytes == counted(graphs[:1])


def test_an_evaluation_takes_time_but_holds_nothing_of_training():
    evaluation = gpt_graph(layers=1).model_copy(update={"training": False})
    plain, with_evaluation = of([gpt_graph(), evaluation], (0, 1, 1)), of([gpt_graph(), evaluation], (0, 1, 1), (1, 3, 0))
    assert with_evaluation.step_us > plain.step_us
    assert with_evaluation.parts_bytes == plain.parts_bytes
