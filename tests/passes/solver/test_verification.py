from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.solver import Arc, Choice, Edge, Entity, Problem, Solution, VerificationError, check, ilp_search, solve
from passes.solver.exhaustive_search import brute_force
from tests.passes.solver.random_problems import tangled

ARCS = (Arc("S", "P", 1.0), Arc("P", "R", 2.0), Arc("S", "R", 4.0))


@pytest.fixture
def problem() -> Problem:
    weight = Entity("weight", "parameter", 2, (Choice(1.0, (8.0,), (), ("S", "R")), Choice(9.0, (4.0,), (), ("R", None))))
    user = Entity("user", "op", 2, (Choice(5.0, (1.0,), ("R", None), ()), Choice(5.0, (1.0,), ("R", "R"), ())))
    return Problem((weight, user), (Edge(0, 0, 1, 0, 2, ARCS, "weight"), Edge(0, 1, 1, 1, 2, ARCS, "aside")), 20.0)


@pytest.fixture
def solution(problem) -> Solution:
    solution = brute_force(problem)
    assert (solution.cost, solution.held_bytes, solution.paths[0]) == (2 * 9.0, (18.0,), ARCS[:2])
    return solution


def test_a_right_solution_passes(problem, solution):
    check(problem, solution)
    check(problem, dataclasses.replace(solution, cost=solution.cost * (1 + 1e-12)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cost": 18.000001}, r"cost: claimed 18.000001, recomputed 18.0"),
        ({"cost": math.nan}, r"cost: claimed nan"),
        ({"held_bytes": (17.0,)}, r"held_bytes at 'step': claimed 17.0, recomputed 18.0"),
        ({"bound": 18.1}, r"bound 18.1 lies above the cost 18.0"),
        ({"chosen": (2, 0)}, r"'weight' takes choice 2 of 2"),
        ({"chosen": (0,)}, r"1 choices and 2 paths for 2 entities and 2 edges"),
        ({"paths": ((ARCS[2],), ())}, r"cost of the path of edge 'weight': claimed 4.0, recomputed 3.0"),
        ({"paths": ((ARCS[0],), ())}, r"ends at P, demanded is R"),
        ({"paths": ((), ())}, r"ends at S, demanded is R"),
        ({"paths": ((ARCS[1],), ())}, r"is at S and has no arc"),
        ({"paths": ((Arc("S", "R", 3.0),), ())}, r"is at S and has no arc"),
        ({"paths": (ARCS[:2], (ARCS[1],))}, r"'aside' takes 1 arcs from R to None"),
        ({"chosen": (1, 1), "paths": ((), ())}, r"'aside' ends at None, demanded is R"),
    ],
)
def test_a_wrong_solution_is_refused_with_its_figures(problem, solution, changes, message):
    with pytest.raises(VerificationError, match=message):
        check(problem, dataclasses.replace(solution, **changes))


def test_a_budget_exceeded_by_one_byte_is_refused(problem, solution):
    check(dataclasses.replace(problem, budget_bytes=18.0), solution)
    with pytest.raises(VerificationError, match="18 bytes are held at 'step', the budget is 17"):
        check(dataclasses.replace(problem, budget_bytes=17.0), solution)


def test_no_claim_is_no_error(problem, solution):
    check(problem, dataclasses.replace(solution, status="no_solution", chosen=(), paths=(), cost=math.inf))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6).map(tangled))
def test_what_brute_force_finds_passes(problem):
    check(problem, brute_force(problem))


def test_every_solve_is_checked(problem, monkeypatch):
    """An objective that the search got wrong does not leave `solve`."""
    original = ilp_search._AssignmentSearch._cost
    monkeypatch.setattr(ilp_search._AssignmentSearch, "_cost", lambda *args: original(*args) * 1.0001)
    with pytest.raises(VerificationError, match="cost"):
        solve(problem)
