from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.solver import Arc, Choice, Edge, Entity, Problem
from passes.solver.exhaustive_search import brute_force
from passes.solver.reduction import NoAssignment, cap, reduce
from passes.solver.rounding import rounded
from tests.passes.solver.random_problems import problems, tangled

BOTH = (Arc("R", "S", 1.0), Arc("S", "R", 10.0))


def left(problem: Problem) -> list[list[int]]:
    return [candidates.tolist() for candidates in reduce(problem).candidates]


def pair(source: tuple[Choice, ...], target: tuple[Choice, ...], arcs=BOTH, budget: float | None = None,
         positions: tuple[str, ...] = ("step",)) -> Problem:
    entities = (Entity("source", "op", 1, source), Entity("target", "op", 1, target))
    return Problem(entities, (Edge(0, 0, 1, 0, 1, arcs, "value"),), budget, positions)


def test_a_choice_that_fits_nothing_goes():
    source = (Choice(0.0, (0.0,), (), ("S",)), Choice(9.0, (0.0,), (), ("R",)))
    target = (Choice(0.0, (0.0,), ("R",), ()), Choice(0.0, (0.0,), ("S",), ()))
    no_gather = (Arc("R", "S", 1.0),)
    assert left(pair(source, target[:1], arcs=no_gather)) == [[1], [0]]
    with pytest.raises(NoAssignment):
        reduce(pair(source[:1], target[:1], arcs=no_gather))


def test_an_edge_with_one_label_at_an_end_is_settled():
    source = (Choice(0.0, (0.0,), (), ("S",)), Choice(4.0, (5.0,), (), ("R",)))
    reduced = reduce(pair(source, (Choice(2.0, (0.0,), ("R",), ()),), budget=5.0))
    assert reduced.open_edges == []
    assert [choices.tolist() for choices in reduced.costs] == [[10.0, 4.0], [2.0]]


def test_a_layer_that_feeds_itself_is_settled():
    choices = (Choice(0.0, (1.0,), ("R",), ("S",)), Choice(8.0, (0.0,), ("S",), ("S",)))
    reduced = reduce(Problem((Entity("layer", "op", 4, choices),), (Edge(0, 0, 0, 0, 3, BOTH, "next"),), 9.0))
    assert reduced.costs[0].tolist() == [3 * 10.0, 4 * 8.0]
    assert reduced.open_edges == []


def test_a_dominated_choice_goes_although_its_label_differs():
    user = (Choice(0.0, (0.0,), ("R",), ()), Choice(0.0, (0.0,), ("S",), ()))
    replicated = Choice(3.0, (0.0,), (), ("R",))
    assert left(pair((replicated, Choice(4.5, (0.0,), (), ("S",))), user))[0] == [0]  # 3 + 1 for the slice < 4.5
    assert left(pair((replicated, Choice(3.5, (0.0,), (), ("S",))), user))[0] == [0, 1]
    assert left(pair((replicated, Choice(4.5, (1.0,), (), ("S",))), user, budget=9.0))[0] == [0]
    assert left(pair((Choice(3.0, (1.0,), (), ("R",)), Choice(4.5, (0.0,), (), ("S",))), user, budget=9.0))[0] == [0, 1]


def test_of_equal_choices_the_lightest_stays():
    same = tuple(Choice(1.0, (held,), (), ("R",)) for held in (3.0, 1.0, 1.0))
    assert left(pair(same, (Choice(0.0, (0.0,), ("R",), ()),)))[0] == [1]


def test_a_choice_that_no_budget_allows_goes():
    source = (Choice(0.0, (8.0,), (), ("R",)), Choice(5.0, (1.0,), (), ("S",)))
    target = (Choice(0.0, (4.0,), ("R",), ()), Choice(0.0, (4.0,), ("S",), ()))
    assert left(pair(source, target, budget=12.0))[0] == [0, 1]
    assert left(pair(source, target, budget=11.0))[0] == [1]
    with pytest.raises(NoAssignment):
        reduce(pair(source, target, budget=4.0))


def test_what_is_lighter_at_one_position_and_heavier_at_another_stays():
    reader = (Choice(0.0, (0.0, 0.0), ("R",), ()),)
    dearer = tuple(Choice(cost, held, (), ("R",)) for cost, held in ((2.0, (1.0, 5.0)), (1.0, (2.0, 4.0))))
    assert left(pair(dearer, reader, budget=9.0, positions=("forward", "backward")))[0] == [0, 1]
    assert left(pair(dearer, reader, budget=4.0, positions=("forward", "backward")))[0] == [1]
    assert left(pair(dearer, reader, positions=("forward", "backward")))[0] == [1]


@settings(max_examples=200, deadline=None)
@given(st.one_of(problems(), st.integers(0, 10**6).map(tangled)))
def test_the_optimum_survives_and_bounds_hold(problem):
    """Solved again with only the choices that are left, the problem costs the same."""
    optimum = brute_force(problem)
    try:
        reduced = reduce(problem)
    except NoAssignment:
        assert optimum.status == "infeasible"
        return
    smaller = brute_force(only(problem, reduced))
    assert smaller.status == optimum.status
    assert math.isclose(smaller.cost, optimum.cost, rel_tol=1e-9)
    assert reduced.lower_bound <= optimum.cost * (1 + 1e-9)

    picked = rounded(reduced)
    if picked is not None:  # cutting off what costs more than this assignment keeps it, and the optimum
        before = reduced.original(picked)
        most = brute_force(only(problem, reduced, before)).cost
        assert most >= optimum.cost * (1 - 1e-9)
        assert reduced.original(cap(reduced, picked, most)) == before
        assert math.isclose(brute_force(only(problem, reduced)).cost, optimum.cost, rel_tol=1e-9)


def only(problem: Problem, reduced, chosen: tuple[int, ...] | None = None) -> Problem:
    """`problem` with the choices that are left in `reduced`, or with those of `chosen` alone."""
    kept = [[choice] for choice in chosen] if chosen is not None else [c.tolist() for c in reduced.candidates]
    entities = tuple(Entity(e.name, e.kind, e.multiplicity, tuple(e.choices[i] for i in numbers))
                     for e, numbers in zip(problem.entities, kept, strict=True))
    return Problem(entities, problem.edges, problem.budget_bytes, problem.positions)
