"""A graph that can be planned before -> a decision and its answer after, found, obeyed or adopted."""
from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from passes.annotations import has, read
from passes.errors import BadInput, Infeasible
from passes.frozen import changeable
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.planning_keys import DECISION, GRAPH_SIGNATURE, OPERATIONS
from passes.hardware.cluster import Cluster
from passes.json_records import FrozenMap
from passes.sharding.formulation.decision_decoder import pins
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.sharding.search.mesh_search import NO_TIME, SearchConfig, SearchResult, SearchTables, candidate_meshes
from passes.sharding.search.placement_passes import SEARCH_RESULT, AdoptPlacements, DecidePlacements, ObeyPlacements
from passes.sharding.strategies import axis_strategies
from passes.sharding.strategies.mesh_strategies import strategies_on_mesh
from passes.solver.solvers import SolverOptions
from tests.passes.traced import annotated_joint, mlp

CONDITIONS = SearchConfig(Cluster.parse("1x4:h100-80g"), solver=SolverOptions(gap=0.0))
CONDITIONS_OF_TWO = replace(CONDITIONS, cluster=Cluster.parse("2x4:h100-80g"))


@pytest.fixture(scope="module")
def model() -> AnalyzedGraph:
    return annotated_joint(mlp(64, 128, 1), torch.randn(16, 64))


def found(model: AnalyzedGraph, entry: DecidePlacements | ObeyPlacements | AdoptPlacements) -> tuple[Decision, SearchResult]:
    entry(model.gm)
    return read(DECISION, model.gm), read(SEARCH_RESULT, model.gm)


def test_the_cheapest_mesh_is_kept_and_the_others_are_named(model):
    decision, answer = found(model, DecidePlacements(CONDITIONS))
    assert decision is answer.placed.decision and decision.axes == answer.mesh.layout_axes
    tried = [answer.mesh.shape, *(each.mesh.shape for each in answer.rejected)]
    assert sorted(tried) == sorted(mesh.shape for mesh in candidate_meshes(CONDITIONS.cluster, None))
    for shape in tried:
        axes = FrozenMap({f"axis{k}": size for k, size in enumerate(shape)})
        _, pinned = found(model, DecidePlacements(CONDITIONS, axes))
        assert pinned.placed.cost.step >= answer.placed.cost.step * (1 - 1e-9) and not pinned.rejected


def test_what_a_plan_pins_is_obeyed_and_priced_alike(model):
    decision, answer = found(model, DecidePlacements(CONDITIONS, FrozenMap({"dp": 4})))
    taken = FrozenMap(pins(answer.placed.problem, answer.placed.solution))
    again, obeyed = found(model, ObeyPlacements(CONDITIONS, FrozenMap({"dp": 4}), taken))
    assert again == decision and obeyed.placed.cost == answer.placed.cost
    wrong = FrozenMap({name: (("S(9)",), ("S(9)",)) for name in taken})
    with pytest.raises(BadInput, match="the plan wants"):
        ObeyPlacements(CONDITIONS, FrozenMap({"dp": 4}), wrong)(model.gm)


def test_a_decision_made_elsewhere_is_adopted(model):
    decision, _ = found(model, DecidePlacements(CONDITIONS, FrozenMap({"dp": 4})))
    other, _ = found(model, DecidePlacements(CONDITIONS, FrozenMap({"x": 2, "y": 2})))
    assert other != decision
    assert found(model, AdoptPlacements(decision))[0] is decision


def test_a_budget_that_no_mesh_meets_names_the_smallest_of_all(model):
    with pytest.raises(Infeasible) as caught:
        DecidePlacements(replace(CONDITIONS, budget_bytes=1.0))(model.gm)
    smallest = caught.value.smallest_budget_bytes  # type: ignore[attr-defined]
    _, answer = found(model, DecidePlacements(replace(CONDITIONS, budget_bytes=smallest)))
    assert answer.placed.cost.held_bytes <= smallest
    with pytest.raises(Infeasible):
        DecidePlacements(replace(CONDITIONS, budget_bytes=smallest - 1))(model.gm)


@pytest.mark.parametrize("seconds", [1e-9, 0.05, 0.3])
def test_with_little_time_there_is_an_answer_that_is_counted_and_not_timed(model, monkeypatch, seconds):
    """Little time: for one mesh after another, with few choices of each group where it is over. What is found is obeyed."""
    conditions = replace(CONDITIONS, cluster=Cluster.parse("2x4:h100-80g"), solver=SolverOptions(gap=0.0, time_limit_s=seconds))
    decision, answer = found(model, DecidePlacements(conditions))
    hours = iter(range(10**9))
    for clock in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, clock, lambda: 3600.0 * next(hours))
    again, busy = found(model, DecidePlacements(conditions))
    assert again == decision and busy.placed.cost == answer.placed.cost and [*busy.rejected] == [*answer.rejected]
    assert {each.reason for each in answer.rejected} == {NO_TIME} if seconds < 0.3 else NO_TIME not in answer.rejected[0].reason
    _, best = found(model, DecidePlacements(replace(conditions, solver=SolverOptions(gap=0.0))))
    assert best.placed.cost.step <= answer.placed.cost.step * (1 + 1e-9)
    taken = FrozenMap(pins(answer.placed.problem, answer.placed.solution))
    mesh = FrozenMap(dict(zip(answer.mesh.names, answer.mesh.shape)))
    assert found(model, ObeyPlacements(CONDITIONS_OF_TWO, mesh, taken))[0] == decision


def test_what_planning_writes_is_frozen(model):
    DecidePlacements(CONDITIONS)(model.gm)
    for key in (GRAPH_SIGNATURE, OPERATIONS, DECISION, SEARCH_RESULT):
        assert has(key, model.gm) and changeable(read(key, model.gm)) is None
    with pytest.raises(TypeError, match="cannot be changed"):
        read(DECISION, model.gm).operations[0] = None  # type: ignore[index]


class WithLogits(torch.nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 512))

    def forward(self, x):
        logits = self.net(x)
        few = logits[:8, :8].contiguous()
        return {"loss": (logits.square().mean(), logits), "logits": (logits,), "few": (few,)}[self.returns]


@pytest.mark.parametrize(("returns", "left"), [("loss", 1), ("logits", 1), ("few", 0)])
def test_large_outputs_stay_as_they_are_computed(returns, left):
    """(loss, logits), or logits alone -> logits sharded by rows, with their gradient. A few numbers without a loss -> whole."""
    model = annotated_joint(WithLogits(returns), torch.randn(4096, 64))
    decision, _ = found(model, DecidePlacements(CONDITIONS, FrozenMap({"dp": 4})))
    assert len(model.graph.unread) == left
    outputs = decision.outputs[:model.interface.forward_outputs]
    assert [route.target for route in outputs] == [*[("R",)] * (len(outputs) - left), *[((0, 0),)] * left]
    assert all(decision.inputs[tangent] == ((0, 0),) for tangent in model.graph.unread.values())


def test_searches_that_differ_in_bytes_alone_share_choices_and_answer_as_each_by_itself(model, monkeypatch):
    listed, memos = [], SearchTables()
    monkeypatch.setattr(axis_strategies, "strategies_on_mesh", lambda *args: listed.append(args) or strategies_on_mesh(*args))
    held = found(model, DecidePlacements(CONDITIONS))[1].placed.cost.held_bytes
    for lifetimes, budget_bytes in (MemoryModel(0.0), held), (MemoryModel(0.5), held), (STEP_PEAK, 0.9 * held):
        conditions = replace(CONDITIONS, lifetimes=lifetimes, budget_bytes=budget_bytes)
        decision, alone = found(model, DecidePlacements(conditions))
        is_first = not memos.by_mesh
        listed.clear()
        same, shared = found(model, DecidePlacements(replace(conditions, memos=memos)))
        assert bool(listed) == is_first, "nothing is looked for again"
        assert (same, shared.mesh, shared.placed.cost) == (decision, alone.mesh, alone.placed.cost)
