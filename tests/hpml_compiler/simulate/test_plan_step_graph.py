"""A decision and the plan that was made of it before -> one step after: the same events and time."""
from __future__ import annotations

import pytest
import torch

from hpml_compiler.plans.from_decision.graph_record import graph_plan
from hpml_compiler.plans.from_decision.user_names import listing
from hpml_compiler.simulate.plan_prices import PlannedPrices
from hpml_compiler.simulate.plan_step_graph import step_graph as of_plan
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.simulation.rank_lanes import RankLanes, one_lane
from passes.simulation.step_timeline import events
from tests.passes.sharding.decision_step_graph import step_graph as of_decision
from tests.passes.traced import annotated_joint, mlp, transformer


def language_model():
    model, batch = transformer(64, 32, 2, 3, rows=4, length=8)
    return annotated_joint(model, *batch)


def chain():
    return annotated_joint(mlp(64, 128, layers=3), torch.randn(8, 64))


@pytest.fixture(scope="module", params=[language_model, chain])
def annotated(request):
    return request.param()


def decided(annotated, prices, tight: bool) -> MeshPlacement:
    """tight: in the least memory that works, so that parameters are stored in parts."""
    axes, stored, budget_bytes = prices.mesh.layout_axes, annotated.interface.stored, None
    if tight:
        with pytest.raises(Infeasible) as error:
            solve_on_mesh(annotated.graph, axes, prices, stored=stored, budget_bytes=1.0)
        budget_bytes = error.value.smallest_budget_bytes
    answer = solve_on_mesh(annotated.graph, axes, prices, stored=stored, budget_bytes=budget_bytes)
    assert isinstance(answer, MeshPlacement)
    return answer


@pytest.mark.parametrize(("cluster", "pin", "tight"), [
    ("1x4:cpu", {"dp": 2, "tp": 2}, False), ("1x4:h100-80g", {"dp": 4}, True), ("1x2:h100-80g", {"tp": 2}, True),
])
def test_a_step_of_the_decision_is_the_step_of_its_plan(annotated, cluster, pin, tight):
    mesh = mesh_from_pin(pin, Cluster.parse(cluster))
    prices = MeshPrices(mesh, 2)
    answer = decided(annotated, prices, tight)
    plan = graph_plan(annotated, mesh, answer, name="graph", seconds={}, prices=prices)
    problem = answer.problem
    graph = of_decision(problem.graph, problem.groups, problem.saved, answer.decision, answer.cost, prices,
                        blocks=listing(annotated, problem, once=False).blocks)
    assert len(graph.calls) == len(plan.operations) and len(graph.legs) == len(plan.redistributions) > 0
    both = graph, of_plan(plan, PlannedPrices(plan))
    for options in ({}, {"recompute": True}, {"overlap": False}):
        ours, theirs = (played(one_lane([each], device=mesh.device, **options)) for each in both)
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], rel=1e-9)
    assert ours[1][-1] == pytest.approx(answer.cost.step)  # one after another: what the planner adds up


def played(lanes: RankLanes) -> tuple[list[tuple[str, str]], list[float]]:
    """What happens in which order, and when."""
    spans = lanes.run()
    found = events(lanes.tasks, lanes.labels, spans)
    times = [us for event in found for us in (event.start_us, event.stop_us)]
    return [(e.stream, e.kind) for e in found], [*times, spans.end_us]
