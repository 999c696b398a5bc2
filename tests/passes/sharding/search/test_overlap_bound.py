"""Random graphs, placed in several ways and simulated with overlap -> no step below the bound over all placements."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.energy_model import Power
from passes.hardware.axis import device_axes
from passes.sharding.formulation.decision_decoder import decode
from passes.sharding.oracle.cost_check import recompute_cost
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.sharding.search.overlap_bound import (
    OverlapShares,
    edges_of_activations,
    least_above_idle_uj,
    least_end_us,
    least_overlapped_us,
    overlapped,
)
from passes.simulation.rank_lanes import one_lane
from passes.simulation.step_graph import StepGraph
from passes.simulation.step_lowering import lower_step
from passes.solver.ilp_search import solve
from passes.solver.solvers import SolverOptions
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.decision_step_graph import step_graph
from tests.passes.sharding.formulation.test_placement_problem import training_step
from tests.passes.sharding.grouping.test_group_symmetry import layers
from tests.passes.sharding.random_graphs import graphs

AXES = axes_of(2, 2)
TOLERANCE = 1e-5
"""Relative tolerance of HiGHS: a bound was 6e-6 above the least cost."""
EVEN = Prices(latency=(30.0, 30.0), us_per_flop=1.0)


def step_of(answer: MeshPlacement, prices: Prices, shares: OverlapShares) -> StepGraph:
    """The step of the best placements by these shares."""
    problem = answer.problem
    decision = decode(problem, solve(overlapped(answer, shares)))
    cost = recompute_cost(problem.graph, problem.groups, problem.saved, decision, prices, TrainingStateModel(),
                          problem.bucket_bytes)
    return step_graph(problem.graph, problem.groups, problem.saved, decision, cost, prices)


def simulated_us(answer: MeshPlacement, prices: Prices, shares: OverlapShares, contention: float) -> float:
    return one_lane([step_of(answer, prices, shares)]).run(contention).end_us


@given(graphs(), st.sampled_from([EVEN, Prices(us_per_flop=10.0), Prices(latency=(1e3, 1e3), us_per_flop=0.01)]),
       st.sampled_from([1.0, 1.19, 2.0]))
@settings(max_examples=60, deadline=None)
def test_no_simulated_step_takes_less(graph, prices, contention):
    answer = solve_on_mesh(graph, AXES, prices)
    assert isinstance(answer, MeshPlacement)
    shares, exact = OverlapShares(contention - 1.0, contention - 1.0), SolverOptions(gap=0.0)  # a gap would be below either
    bound = least_overlapped_us(answer, shares, exact)
    assert bound <= answer.cost.step * (1 + TOLERANCE)
    recomputing = least_overlapped_us(answer, replace(shares, recomputing=contention - 1.0), exact)
    assert recomputing <= bound * (1 + TOLERANCE)
    for share in (0.0, contention - 1.0, 1.0, 5.0):
        assert bound <= simulated_us(answer, prices, OverlapShares(share, share), contention) * (1 + TOLERANCE) + 1e-6


@given(graphs(), st.sampled_from([EVEN, Prices(us_per_flop=10.0), Prices(latency=(1e3, 1e3), us_per_flop=0.01)]))
@settings(max_examples=40, deadline=None)
def test_no_placements_compute_with_less_energy(graph, prices):
    answer = solve_on_mesh(graph, AXES, prices)
    assert isinstance(answer, MeshPlacement)
    power = Power(arithmetic_w=400.0, memory_w=260.0, communication_w=150.0, idle_w=50.0)
    bound = least_above_idle_uj(answer, power)
    assert bound > 0.0 or not any(op.flops for op in graph.operations)
    for share in (0.0, 1.0, 5.0):
        step = step_of(answer, prices, OverlapShares(share, share))
        spent = sum(each.us * ((power.kernel_w(each.kernel) if each.kernel else power.communication_w) - power.idle_w)
                    for each in lower_step([step]).entries)
        assert bound <= spent * (1 + 1e-9) + 1e-6


def test_without_free_overlap_it_is_the_bound_of_the_sum():
    graph, _ = training_step()
    answer = solve_on_mesh(graph, AXES, EVEN)
    assert isinstance(answer, MeshPlacement)
    assert least_overlapped_us(answer, OverlapShares(1.0, 1.0)) == pytest.approx(answer.solution.bound)
    assert least_overlapped_us(answer, OverlapShares(0.0, 0.0)) < answer.solution.bound


def test_nothing_runs_beside_what_the_next_operation_waits_for():
    """x + down(exp(up(x))): each result is read next, and x again only later; parameters are no activations."""
    b = layers(3)
    answer = solve_on_mesh(b.finish([len(b.values) - 1]), device_axes({"x": 2}), EVEN, fold=False)
    assert isinstance(answer, MeshPlacement)
    waited, beside = edges_of_activations(answer.problem)
    edges, entities = answer.solved.edges, answer.solved.entities
    waits = {entities[edges[e].target].name: e in waited for e in sorted(waited.keys() | beside)}
    names = [f"net.layers.*:op_{number}" for number in range(1, 5)]  # up, exp, down and the sum
    assert [waits[name] for name in names] == [False, True, True, True], "x comes from another block"
    assert not waits["shared:value_1"] and not waits["op_13"]
    assert not any(entities[edges[e].source].kind == "parameter" for e in waited.keys() | beside)


@pytest.mark.parametrize("skips", [False, True])
def test_what_comes_after_the_layers_stays_together(skips):
    """The last operations count; if they read the entry, too, a cut may divide them."""
    b = Builder()
    x = entry = b.call(aten.mm.default, V(b.input((8, 4))), V(b.input((4, 4), "parameter")))
    for k in range(3):
        b.block = f"net.layers.{k}"
        x = b.call(aten.mm.default, V(x), V(b.input((4, 4), "parameter")))
    b.block = ""
    x = b.call(aten.mm.default, V(x), V(b.input((4, 16), "parameter")))
    if skips:
        b.call(aten.mul.Tensor, V(x), V(b.call(aten.mm.default, V(entry), V(b.input((4, 16), "parameter")))))
    answer = solve_on_mesh(b.finish([len(b.values) - 1]), device_axes({"x": 2}), EVEN)
    assert isinstance(answer, MeshPlacement)
    found = least_end_us(answer.problem, ["net.layers"])
    assert found == 0.0 if skips else 512.0 < found < 600.0, "half of its 1024 FLOPs, at 1 us each, and a launch"
