"""Random placement graphs and decisions -> a step whose serial time is the planner's sum."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.simulation.rank_lanes import one_lane
from tests.helpers.axes import axes_of
from tests.passes.graphs import Prices
from tests.passes.sharding.decision_step_graph import step_graph
from tests.passes.sharding.random_graphs import graphs

AXES = axes_of(2, 2)


@given(graphs(), st.sampled_from([Prices(us_per_flop=10.0), Prices(latency=(1e3, 1e3), us_per_flop=0.01)]))
@settings(max_examples=60, deadline=None)
def test_one_after_another_a_step_takes_its_cost(graph, prices):
    answer = solve_on_mesh(graph, AXES, prices)
    assert isinstance(answer, MeshPlacement)
    problem = answer.problem
    step = step_graph(graph, problem.groups, problem.saved, answer.decision, answer.cost, prices)
    assert one_lane([step], overlap=False).run().end_us == pytest.approx(answer.cost.step)
    assert sum(leg.gradient for leg in step.legs) <= len(graph.outputs)
