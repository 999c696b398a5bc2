from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import Infeasible
from passes.solver import Arc, Choice, Edge, Entity, Problem, SolverOptions, ilp, solve, solvers
from passes.solver.exhaustive_search import brute_force
from tests.passes.solver.random_problems import hard_chain, problems, tangled

EXACT = SolverOptions(gap=0.0)


def agrees_with_brute_force(problem: Problem, options: SolverOptions = EXACT) -> None:
    optimum = brute_force(problem)
    try:
        solution = solve(problem, options)
    except Infeasible:
        assert optimum.status == "infeasible"
        return
    assert solution.status == "optimal" and solution.gap == 0
    assert math.isclose(solution.cost, optimum.cost, rel_tol=1e-9, abs_tol=1e-12)
    assert solution.bound == solution.cost


@settings(max_examples=300, deadline=None)
@given(problems())
def test_any_graph_is_solved_as_by_brute_force(problem):
    agrees_with_brute_force(problem)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6).map(tangled))
def test_tangled_graphs_are_solved_as_by_brute_force(problem):
    agrees_with_brute_force(problem)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6).map(tangled))
def test_within_a_gap_the_bound_and_the_objective_enclose_the_optimum(problem):
    optimum = brute_force(problem)
    if optimum.status == "infeasible":
        return
    solution = solve(problem, SolverOptions(gap=0.2))
    assert solution.status == "optimal" and solution.gap <= 0.2
    assert solution.bound <= optimum.cost * (1 + 1e-6)
    assert optimum.cost <= solution.cost * (1 + 1e-9)
    assert solution.cost <= optimum.cost / 0.8 * (1 + 1e-6) + 1e-9


def test_column_then_row_parallel_beats_gathering_in_between():
    """Two matmuls: split columns, then rows, and one reduction at the end; no label is favored anywhere."""
    arcs = (Arc("R", "S0", 0.0), Arc("R", "S1", 0.0), Arc("S0", "R", 40.0), Arc("S1", "R", 40.0), Arc("P", "R", 50.0),
            Arc("S0", "S1", 30.0), Arc("S1", "S0", 30.0))
    matmul = (Choice(100.0, (0.0,), ("R",), ("R",)), Choice(50.0, (0.0,), ("R",), ("S1",)),
              Choice(50.0, (0.0,), ("S1",), ("P",)))
    whole = (Choice(0.0, (0.0,), ("R",), ("R",)),)
    entities = (Entity("input", "input", 1, (Choice(0.0, (0.0,), (), ("R",)),)), Entity("up", "op", 1, matmul),
                Entity("gelu", "op", 1, (Choice(8.0, (0.0,), ("R",), ("R",)), Choice(4.0, (0.0,), ("S1",), ("S1",)))),
                Entity("down", "op", 1, matmul), Entity("output", "output", 1, whole))
    edges = tuple(Edge(i, 0, i + 1, 0, 1, arcs, f"value {i}") for i in range(4))
    solution = solve(Problem(entities, edges), EXACT)
    assert solution.chosen == (0, 1, 1, 2, 0)
    assert solution.cost == 50 + 4 + 50 + 50
    assert solution.paths == ((), (), (), (), (arcs[4],))[1:]


def test_a_budget_shards_what_is_cheapest_to_shard():
    gather = (Arc("S", "R", 5.0),)
    parameters = tuple(
        Entity(f"weight {i}", "parameter", 1, (Choice(0.0, (8.0,), (), ("R",)), Choice(0.0, (2.0,), (), ("S",))))
        for i in range(3)
    )
    user = Entity("user", "op", 1, (Choice(1.0, (0.0,), ("R", "R", "R"), ()),))
    edges = tuple(Edge(i, 0, 3, i, 1 + i, gather, f"weight {i} -> user") for i in range(3))
    for budget, sharded in ((24.0, 0), (23.0, 1), (18.0, 1), (12.0, 2), (6.0, 3)):
        solution = solve(Problem((*parameters, user), edges, budget), EXACT)
        assert solution.chosen == (1,) * sharded + (0,) * (4 - sharded)  # those with fewer gathers first
        assert solution.held_bytes == (24 - 6 * sharded,)


def test_costs_that_span_nine_orders_of_magnitude_are_told_apart():
    """A choice that nobody takes, 1e9 times dearer than the rest, hides no difference of 1e-6."""
    def op(extra: float) -> tuple[Choice, ...]:
        return (Choice(1e9, (0.0,), ("R",), ("R",)), Choice(1.0 + extra, (2.0,), ("S",), ("S",)),
                Choice(1.0, (3.0,), ("P",), ("P",)), Choice(1.001, (1.0,), ("S",), ("P",)))

    arcs = (Arc("R", "S", 1e-3), Arc("S", "R", 2e-3), Arc("P", "S", 1.1e-3), Arc("R", "P", 1.0), Arc("S", "P", 1e-3))
    entities = tuple(Entity(f"op {i}", "op", 1, op(1e-6 * i)) for i in range(6))
    edges = tuple(Edge(i, 0, i + 1, 0, 1, arcs, f"value {i}") for i in range(5))
    for budget in (None, 14.0, 11.0, 8.0):
        agrees_with_brute_force(Problem(entities, edges, budget))


def test_when_time_runs_out_there_are_an_incumbent_a_bound_and_a_gap(monkeypatch):
    outcomes = []
    original = solvers.run
    monkeypatch.setattr(solvers, "run", lambda *args, **kw: outcomes.append(original(*args, **kw)) or outcomes[-1])
    solution = solve(hard_chain(), SolverOptions(gap=0.0, time_limit_s=1.5))
    assert solution.status == "feasible"
    relaxation, program = outcomes
    assert (relaxation.state, program.state) == ("optimal", "feasible")
    assert program.bound >= relaxation.bound  # the solver's own bound, not the relaxation's again
    unit = solution.bound / program.bound
    assert math.log2(unit).is_integer()
    assert 0 < solution.bound < solution.cost < math.inf
    assert math.isclose(solution.gap, 1 - solution.bound / solution.cost, rel_tol=1e-9)
    assert solution.seconds < 20
    assert max(solution.held_bytes) <= hard_chain().budget_bytes
    assert (solution.variables, solution.binaries) > (0, 0) and solution.constraints > 0


def test_an_integral_relaxation_needs_no_mip(monkeypatch):
    runs = []
    original = solvers.run
    monkeypatch.setattr(solvers, "run", lambda *args, **kw: runs.append(kw["integer"]) or original(*args, **kw))
    solution = solve(hard_chain(budget=False), EXACT)  # the relaxation of a chain is integral
    assert (solution.status, solution.gap, solution.integral_relaxation) == ("optimal", 0.0, True)
    assert runs == [False]
    assert not solve(hard_chain(), SolverOptions(gap=0.5)).integral_relaxation


def test_a_cutoff_below_the_bound_ends_the_search():
    problem = hard_chain(budget=False)
    optimum = solve(problem, EXACT).cost
    hopeless = solve(problem, EXACT, cutoff=0.1 * optimum)
    assert (hopeless.status, hopeless.chosen, hopeless.variables) == ("no_solution", (), 0)  # the reduction's bound did
    assert 0.1 * optimum < hopeless.bound <= optimum
    close = solve(problem, EXACT, cutoff=0.999 * optimum)
    assert (close.status, close.paths, close.cost) == ("no_solution", (), math.inf)
    assert 0.999 * optimum < close.bound <= optimum * (1 + 1e-6)
    assert solve(problem, EXACT, cutoff=1.001 * optimum).cost == optimum


def test_a_solution_beyond_the_budget_by_less_than_the_tolerance_is_cut_off(monkeypatch):
    """A solver that takes the byte row a little loosely: the exact count finds it out, and covers exclude it."""
    problem = tangled_with_budget()
    optimum = brute_force(problem)
    original, covers = ilp.budget, []

    def loose(model: ilp.PlacementILP) -> None:
        reduced = dataclasses.replace(problem, budget_bytes=problem.budget_bytes + 3)
        held, model.reduced.problem = model.reduced.problem, reduced
        original(model)
        model.reduced.problem = held

    real_cover = ilp.cover

    def covered(model: ilp.PlacementILP, picked: list[int], position: int) -> None:
        covers.append(picked)
        real_cover(model, picked, position)

    monkeypatch.setattr(ilp, "budget", loose)
    monkeypatch.setattr(ilp, "cover", covered)
    solution = solve(problem, EXACT)
    assert covers
    assert math.isclose(solution.cost, optimum.cost, rel_tol=1e-9)


def tangled_with_budget() -> Problem:
    """Layers that save up to 40 us for one byte more each; 3 bytes more than the budget would change the optimum."""
    layers = tuple(
        Entity(f"layer {i}", "op", 1, tuple(
            Choice(cost + i, (held,), (), (label,))
            for cost, held, label in ((50.0, 1.0, "R"), (11.0, 3.0, "S"), (10.0, 4.0, "P"))))
        for i in range(4)
    )
    reader = Entity("reader", "op", 1, tuple(Choice(3.0, (0.0,), (a, b, a, b), ()) for a in "RSP" for b in "RSP"))
    arcs = tuple(Arc(a, b, 1.0) for a in "RSP" for b in "RSP" if a != b)
    edges = tuple(Edge(i, 0, 4, i, 1, arcs, f"value {i}") for i in range(4))
    return Problem((*layers, reader), edges, 9.0)


def test_an_empty_problem_is_solved():
    solution = solve(Problem((), ()))
    assert (solution.status, solution.cost, solution.held_bytes) == ("optimal", 0.0, (0.0,))


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(hard_chain(), SolverOptions(gap=0.05))


@pytest.mark.parametrize("solver", ["HiGHS_CMD", "COIN_CMD", "PULP_CBC_CMD", "GLPK_CMD"])
def test_other_solvers_find_the_same(solver):
    try:
        solvers.check_options(SolverOptions(solver))
    except Exception as error:
        pytest.skip(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(12):
            agrees_with_brute_force(tangled(seed), SolverOptions(solver, gap=0.0))
        solution = solve(hard_chain(), SolverOptions(solver, gap=0.02))
    assert solution.solver == solver
    assert solution.status == "optimal" and 0 < solution.gap <= 0.02
