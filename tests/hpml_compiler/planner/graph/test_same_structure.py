"""Graphs with one structure and other sizes -> the first one's decisions, priced again; a search if they do not fit."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from hpml_compiler.demo.train import GPT
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.same_structure import structural_hash
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.plan_result import PlanResult
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster

CLUSTER = Cluster.parse("1x2:h100-80g")


def of_length(length: int, rows: int = 4, options: Options | None = None) -> AnalyzedGraph:
    torch.manual_seed(0)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    model = GPT(width=64, heads=2, layers=2, length=64)
    return TracedModel(model, (tokens, tokens), options or Options.parse({})).whole[0]


def plan(annotated: AnalyzedGraph, like: PlanResult | None = None, **options) -> PlanResult:
    return plan_graph(annotated, Options.parse(options), CLUSTER, like=like.record if like else None)


@pytest.fixture(scope="module")
def first() -> PlanResult:
    return plan(of_length(32))


def test_the_structure_of_a_graph_does_not_know_its_sizes():
    free, graph = Options.parse({}), of_length(32)
    assert structural_hash(graph, free) == structural_hash(of_length(64), free) == structural_hash(of_length(48, rows=6), free)
    other = TracedModel(nn.Linear(4, 4), (torch.zeros(2, 4),), free).whole[0]
    assert structural_hash(other, free) != structural_hash(graph, free)
    assert structural_hash(graph, free, frozenset(["tokens"])) != structural_hash(graph, free)
    # another wish, another answer
    assert structural_hash(graph, Options.parse({"mesh": {"tp": 2}})) != structural_hash(graph, free)


def test_another_length_takes_the_decisions_of_the_first_at_its_own_price(first):
    annotated = of_length(64)
    again, searched = plan(annotated, first), plan(annotated)
    assert again.record.solver.status == "as graph" and again.record.solver.gap is None
    assert again.record.decisions == first.record.decisions and again.mesh == first.mesh
    assert again.record.parameters == first.record.parameters
    # Priced as the graph that it is for: the same decisions cost the same, whoever found them.
    assert again.record.predicted.step_time_us > first.record.predicted.step_time_us
    pinned = plan_graph(annotated, Options.parse({"mesh": first.mesh}), CLUSTER, like=searched.record)
    assert pinned.record.predicted == searched.record.predicted


def test_what_an_axis_does_not_divide_is_searched_for():
    first = plan(of_length(32), mesh={"dp": 2})
    assert plan(of_length(32, rows=1), first, mesh={"dp": 2}).record.solver.status == "optimal"
    odd = plan(of_length(32, rows=3), first, mesh={"dp": 2}).record
    assert (odd.solver.status, odd.rows_by_rank) == ("as graph", {"dp": (2, 1)}), "unequal rows fit"


def test_decisions_that_exceed_the_budget_are_searched_for(first):
    annotated = of_length(64)
    memory = plan(annotated, first).record.memory
    held = memory.parameters + memory.gradients + memory.optimizer + memory.activations
    tight = plan(annotated, first, memory_budget=int(held * 0.9))
    assert tight.record.solver.status == "optimal" and tight.record.decisions != first.record.decisions


def test_decisions_on_another_mesh_than_the_one_in_use_are_not_taken(first):
    other = plan_graph(of_length(64), Options.parse({}), CLUSTER, fixed_mesh={"dp": 2}, like=first.record)
    assert first.mesh != {"dp": 2} == other.mesh and other.record.solver.status == "optimal"
