"""A placement graph and powers -> the placements of least energy, with their time."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.cost_terms import SLICE
from passes.cost_model.energy_model import EnergyPrices
from passes.hardware.device import Device
from passes.hardware.mesh import Mesh, MeshAxis
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.solver.solvers import SolverOptions
from tests.helpers.axes import axes_of
from tests.passes.graphs import Prices
from tests.passes.sharding.exhaustive import Game
from tests.passes.sharding.formulation.test_placement_problem import training_step
from tests.passes.sharding.random_graphs import graphs
from tests.passes.sharding.search.test_mesh_placement import deep

EXACT = SolverOptions(gap=0.0)


def energies(times: Prices, sizes=(2,), *, idle=0.0, busy=400.0, memory=200.0, communication=50.0, joules=0.0) -> EnergyPrices:
    device = Device("d", "cuda", 2**30, 1e12, {"float32": 1e12}, 1.0, idle, busy, "test", memory_power_w=memory,
                    communication_power_w=communication)
    axes = (MeshAxis(name, size, 1.0, 1e9, energy_j_per_byte=joules) for name, size in zip("xy", sizes))
    return EnergyPrices(times, Mesh(tuple(axes), device))


def placed(graph, sizes, prices, **options) -> MeshPlacement:
    answer = solve_on_mesh(graph, axes_of(*sizes), prices, **options)
    assert isinstance(answer, MeshPlacement)
    return answer


def is_split(answer: MeshPlacement) -> set[bool]:
    heavy = [op for op in answer.problem.graph.operations if op.heavy]
    return {any(isinstance(p, tuple) for layout in answer.decision.operations[op.index].inputs for p in layout) for op in heavy}


def test_communication_that_is_slow_but_draws_little_is_worth_its_energy_and_not_its_time():
    graph, _ = training_step()
    times = Prices(latency=(3000.0,), us_per_byte=(0.0,), us_per_flop=1.0)
    energy = energies(times, communication=1.0)
    fast = placed(graph, (2,), times, other_prices=energy, options=EXACT)
    frugal = placed(graph, (2,), energy, other_prices=times, options=EXACT)
    assert is_split(fast) == {False} and is_split(frugal) == {True}
    assert frugal.cost.step < fast.other_cost.step and frugal.other_cost.step > fast.cost.step


def test_links_that_take_much_energy_are_not_used_however_fast():
    graph, _ = training_step()
    times = Prices(latency=(1e-3,), us_per_byte=(1e-6,), us_per_flop=1.0)
    cheap, dear = (placed(graph, (2,), energies(times, joules=joules), options=EXACT) for joules in (0.0, 1.0))
    assert is_split(cheap) == {True} and is_split(dear) == {False}


@settings(max_examples=60, deadline=None)
@given(graphs(most=6), st.sampled_from([2, 3]), st.sampled_from([0.001, 0.05, 1.0]), st.sampled_from([0.0, 2.0, 20.0]),
       st.sampled_from([1.0, 50.0, 400.0]), st.sampled_from([0.0, 1e-5]))
def test_nothing_takes_less_energy_than_what_is_placed(graph, size, per_byte, latency, communication, joules):
    """By trying everything; but for slices, which cost next to nothing in any unit."""
    prices = energies(Prices(latency=(latency,), us_per_byte=(per_byte,)), (size,), communication=communication, joules=joules)
    found = placed(graph, (size,), prices, options=EXACT)
    best = Game(graph, (size,), prices, found.problem.groups).optimum()
    slack = 2 * len(found.problem.problem.edges) * SLICE
    assert best * (1 - 1e-9) - 1e-9 <= found.cost.step <= best * (1 + 1e-6) + slack


@settings(max_examples=30, deadline=None)
@given(graphs(most=5), st.sampled_from([(2,), (2, 3)]))
def test_where_everything_draws_the_same_energy_is_time(graph, sizes):
    times = Prices()
    energy = energies(times, sizes, idle=250.0, busy=250.0, memory=250.0, communication=250.0)
    answer = placed(graph, sizes, energy, other_prices=times, options=EXACT)
    slices = 10 * len(answer.problem.problem.edges) * SLICE
    assert answer.cost.step == pytest.approx(250 * answer.other_cost.step, abs=250 * slices, rel=1e-9)
    fastest = placed(graph, sizes, times, options=EXACT).cost.step
    assert fastest == pytest.approx(answer.other_cost.step, abs=slices, rel=1e-9)
    assert answer.other_cost.held_bytes == answer.cost.held_bytes


def test_fewer_layers_tell_both_costs_of_all_of_them():
    times = Prices(us_per_flop=10.0)
    energy = energies(times)
    short = placed(deep(4), (2,), energy, other_prices=times, shorter=deep(3), further=5)
    whole = placed(deep(9), (2,), energy, other_prices=times)
    assert short.cost.step == pytest.approx(whole.cost.step, rel=1e-6)
    assert short.other_cost.step == pytest.approx(whole.other_cost.step, rel=1e-6)


def test_without_other_prices_there_is_no_other_cost():
    graph, _ = training_step()
    assert placed(graph, (2,), Prices()).other_cost is None
