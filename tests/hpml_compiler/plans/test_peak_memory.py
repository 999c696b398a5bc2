"""Memory of a step's graphs -> a device's peak, by part."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan, PeakRecord, RecomputedCall, SavedValue
from hpml_compiler.plans.peak_memory import counted_peak, fixed_values
from hpml_compiler.plans.schema import GraphPlan
from tests.helpers.plans import gpt_graph, gpt_plan


def with_kept(graph: GraphPlan, forward: dict[str, int], backward: dict[str, int], saved: int = 0, gradients: int = 0,
              again: bool = False) -> GraphPlan:
    return graph.model_copy(update={"kept": CheckpointingPlan(
        budget_bytes=1000, saved_bytes=saved, gradient_bytes=gradients, saved={"gelu_0": SavedValue(block="h.0", bytes=saved)},
        again={"fc_0": RecomputedCall(block="h.0.fc", predicted_us=10.0)} if again else {},
        forward=PeakRecord(node="head", block="", again=False, parts=forward),
        backward=PeakRecord(node="fc_0" if again else "proj_grad_0", block="h.0", again=again, parts=backward))})


def state(graph: GraphPlan) -> int:
    stored = sum(each.bytes_per_device for each in graph.parameters.values())
    return max(stored, graph.memory.parameters) + graph.memory.optimizer


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(nn.functional.dropout(self.up(x), 0.1)).square().mean()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_random_numbers_have_rows(microbatches):
    plan = hpml_compiler.plan(Dropped(), (torch.zeros(64, 64),), cluster="1x2:a100-80g", mesh={"dp": 2},
                              microbatches=microbatches)
    (graph,) = plan.graphs
    fixed = fixed_values(graph)
    masks = {name for name, each in graph.operations.items() if each.op == "hpml.random_at.default"}
    masks |= {name for name, each in graph.operations.items() if masks.intersection(each.sources)}
    assert len(masks) >= 2 and masks.isdisjoint(fixed)
    weights = {name for name, each in graph.operations.items() if {*each.sources} & {"up.weight", "down.weight"}
               and len(each.sources) == 1 and not each.backward}
    assert weights and weights <= fixed


def test_one_graph_is_fullest_where_it_holds_most():
    graph = with_kept(gpt_graph(), {"saved": 10, "transient": 50}, {"saved": 10, "recomputed": 30, "gradients": 5}, again=True)
    peak = counted_peak([graph])
    assert (peak.phase, peak.node, peak.bytes) == ("forward", "head", state(graph) + 60)
    graph = with_kept(gpt_graph(), {"saved": 10}, {"saved": 10, "recomputed": 30, "gradients": 5}, again=True)
    peak = counted_peak([graph])
    assert (peak.phase, peak.node, peak.block) == ("recompute", "fc_0", "h.0") and peak.parts["recomputed"] == 30


def test_a_graph_runs_beside_what_others_saved_and_their_gradients():
    """Backward of the first comes last, when the second has made its gradients; forward of the second, beside what is saved."""
    first = with_kept(gpt_graph(), {"saved": 5}, {"saved": 5, "transient": 20}, saved=5, gradients=7)
    second = with_kept(gpt_graph(name="second"), {"saved": 4, "transient": 15}, {"saved": 4, "transient": 14}, saved=4,
                       gradients=9)
    peak = counted_peak([first, second])
    assert peak.graph == "GPT" and peak.parts["gradients"] == 9 and peak.parts["saved"] == 5
    assert peak.bytes == state(first) + 5 + 20 + 9  # parameters are those of the first


def test_the_optimizer_may_be_what_holds_most():
    graph = with_kept(gpt_graph(), {"saved": 10}, {"saved": 10}, gradients=40)
    more = {"step_bytes": state(graph) + 100}
    graph = graph.model_copy(update={"kept": graph.kept.model_copy(update=more)})
    peak = counted_peak([graph])
    assert (peak.phase, peak.bytes) == ("optimizer", state(graph) + 100)
    assert (peak.parts["gradients"], peak.parts["transient"]) == (40, 60)


def test_a_plan_without_a_budget_was_not_counted():
    assert gpt_plan().peak is None and counted_peak([gpt_graph(), with_kept(gpt_graph(), {}, {})]) is None


def test_files_keep_what_is_kept(tmp_path):
    plan = gpt_plan()
    plan = plan.model_copy(update={"graphs": (with_kept(plan.graphs[0], {"saved": 10}, {"saved": 10}, saved=10, again=True),)})
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.peak == plan.peak and loaded.graphs[0].kept.again_us == 10.0
