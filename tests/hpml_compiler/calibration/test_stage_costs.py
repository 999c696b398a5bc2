"""A plan of all layers -> stages whose times add up to those of the whole, cut evenly."""
from __future__ import annotations

import pytest
import torch

import hpml_compiler
from hpml_compiler.calibration.rows import Row
from hpml_compiler.calibration.stage_costs import depth, pipeline_us, stage_cluster, stages_of, with_layers
from hpml_compiler.demo.train import GPT
from hpml_compiler.plans.plan import Plan
from hpml_compiler.simulate import simulate
from passes.errors import BadInput

LAYERS = 12


@pytest.fixture(scope="module")
def plan() -> Plan:
    tokens = torch.zeros(16, 16, dtype=torch.long)
    made = hpml_compiler.plan(GPT(width=128, heads=2, layers=LAYERS, length=16), (tokens, tokens), cluster="1x2:a100-80g",
                              mesh={"tp": 2})
    assert isinstance(made, Plan)
    return made


def row(stages: int = 1, virtual: int = 1, microbatches: int = 1, recompute: str = "none") -> Row:
    return Row.model_validate({
        "name": "row", "target": "m.py:f", "cluster": f"{stages}x2:a100-80g", "mesh": {"tp": 2}, "tflops_per_device": 1.0,
        "formula": "megatron", "microbatches": microbatches, "recompute": recompute,
        "arguments": {"layers": LAYERS, "hidden": 128, "vocabulary": 256, "sequence": 16, "batch": 16},
        "pipeline": {"stages": stages, "virtual": virtual, "schedule": "interleaved" if virtual > 1 else "1f1b"},
    })


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_stage_takes_what_the_simulated_plan_takes(plan, recompute):
    """Extrapolated from few layers, against a simulation of all of them, which hides some of the gradients' reductions."""
    one = row(recompute=recompute)
    whole_us = simulate(plan, one.cluster, recompute=recompute).step_us  # type: ignore[arg-type]
    (stage,) = stages_of(plan, stage_cluster(one), one)
    us = pipeline_us(plan, stage_cluster(one), one)
    assert us == pytest.approx(stage.forward_us + stage.backward_us + stage.reduce_us + stage.optimizer_us)
    assert 0.99 * (us - stage.reduce_us) <= whole_us <= 1.01 * us
    assert stage.reduce_us < 0.1 * us


def test_stages_share_out_the_whole(plan):
    (whole,) = stages_of(plan, stage_cluster(row()), row())
    four = row(stages=2, virtual=2)
    found = stages_of(plan, stage_cluster(four), four)
    assert len(found) == 4 and found[0] == found[1] == found[2]
    for name in ("forward_us", "backward_us", "optimizer_us"):
        assert sum(getattr(stage, name) for stage in found) == pytest.approx(getattr(whole, name))
        assert getattr(found[-1], name) > getattr(found[0], name)  # the head and the loss are there


def test_a_microbatch_takes_less_than_the_batch_but_more_than_its_part(plan):
    (whole,), (part,) = (stages_of(plan, stage_cluster(row()), row(microbatches=m)) for m in (1, 4))
    assert whole.forward_us / 4 < part.forward_us <= whole.forward_us


def test_fewer_microbatches_than_stages_leave_a_bubble(plan):
    """With equal stages 1F1B takes (m + p - 1) times a stage; the last one is longer, and sends take time."""
    two = row(stages=2, microbatches=4)
    stages = stages_of(plan, stage_cluster(two), two)
    step_us = pipeline_us(plan, stage_cluster(two), two)
    shortest, longest = (stage.forward_us + stage.backward_us for stage in (stages[0], stages[-1]))
    assert step_us > 5 * shortest
    assert step_us < 5 * longest + 16 * stages[0].send_us + sum(s.optimizer_us for s in stages)


def test_what_goes_between_stages_is_a_ranks_part_of_the_residual_stream(plan):
    two = row(stages=2, microbatches=4)
    link = stage_cluster(two).inter_node
    nbytes = 4 * 16 * 128 * 2 / 2  # rows, tokens, hidden, bytes, over two ranks
    assert stages_of(plan, stage_cluster(two), two)[0].send_us == pytest.approx(
        link.latency_us + nbytes / (link.bandwidth_bytes_per_s * link.efficiency) * 1e6)


def test_a_stage_has_its_part_of_the_nodes():
    assert stage_cluster(row(stages=4)).group.nodes == 1
    split = row(stages=2).model_copy(update={"cluster": "3x2:a100-80g"})
    with pytest.raises(BadInput, match="3 nodes cannot be shared out among 2 stages"):
        stage_cluster(split)


def test_another_number_of_layers_changes_what_runs_per_layer(plan):
    (graph,) = plan.graphs
    assert depth(graph) == LAYERS
    fewer = with_layers(graph, 5)
    changed = {(graph.multiplicity[name], fewer.multiplicity[name]) for name in graph.multiplicity}
    assert (LAYERS, 5) in changed and changed <= {(n, n - LAYERS + 5) for n in range(LAYERS // 2, LAYERS + 6)} | {(1, 1)}
    assert with_layers(graph, LAYERS) == graph


def test_layers_that_do_not_divide_are_refused(plan):
    five = row(stages=5)
    with pytest.raises(BadInput, match="12 layers cannot be cut evenly into 5"):
        stages_of(plan, stage_cluster(five), five)


def test_a_plan_that_lists_every_layer_is_refused(plan):
    (graph,) = plan.graphs
    with pytest.raises(BadInput, match="lists every layer"):
        depth(graph.model_copy(update={"multiplicity": {}}))
