from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import Infeasible
from passes.solver import Arc, Choice, Edge, Entity, Problem, solve
from passes.solver.exhaustive_search import brute_force
from tests.passes.solver.random_problems import hard_chain, tangled


def test_a_budget_that_nobody_can_meet_names_the_smallest_that_works():
    weight = Entity("weight", "parameter", 4, (Choice(0.0, (8e9,), (), ("R",)), Choice(1.0, (2e9 + 1,), (), ("S",))))
    problem = Problem((weight,), (), 7.5e9)
    with pytest.raises(Infeasible) as error:
        solve(problem)
    assert error.value.smallest_budget_bytes == 8e9 + 4
    assert "smallest that works is 8.001 GB" in error.value.what  # rounded up, so that what is printed works
    assert error.value.where == "budget of 7.500 GB on each device"
    assert "at least 8000000004 bytes" in error.value.next_step
    assert pickle.loads(pickle.dumps(error.value)).smallest_budget_bytes == 8e9 + 4
    solve(dataclasses.replace(problem, budget_bytes=8000000004))


def test_the_smallest_budget_is_what_the_position_that_needs_most_needs_at_least():
    """Neither the least for forward, nor the least for backward, nor the least in all is the answer."""
    helds = ((2.0, 20.0), (20.0, 1.0), (9.0, 12.0), (11.0, 11.0))
    entity = Entity("weight", "parameter", 1, tuple(Choice(0.0, held, (), ("R",)) for held in helds))
    problem = Problem((entity,), (), 10.0, ("forward", "backward"))
    with pytest.raises(Infeasible, match="smallest that works is 11 B") as error:
        solve(problem)
    assert error.value.smallest_budget_bytes == 11.0
    assert solve(dataclasses.replace(problem, budget_bytes=11.0)).held_bytes == (11.0, 11.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6).map(tangled))
def test_the_smallest_budget_works_and_a_byte_less_does_not(problem):
    try:
        solve(dataclasses.replace(problem, budget_bytes=0.0))
    except Infeasible as error:
        smallest = getattr(error, "smallest_budget_bytes", None)
    else:
        return
    if smallest is None:  # no path, whatever the budget
        assert brute_force(dataclasses.replace(problem, budget_bytes=None)).status == "infeasible"
        return
    solution = solve(dataclasses.replace(problem, budget_bytes=smallest))
    assert max(solution.held_bytes) == smallest
    assert brute_force(dataclasses.replace(problem, budget_bytes=smallest - 1)).status == "infeasible"


def test_the_smallest_budget_of_a_long_chain():
    problem = hard_chain()
    with pytest.raises(Infeasible) as error:
        solve(dataclasses.replace(problem, budget_bytes=1e6))
    lightest = sum(min(choice.held_bytes[0] for choice in entity.choices) for entity in problem.entities)
    assert error.value.smallest_budget_bytes == lightest


def chain(*labels: tuple[str | None, str | None], arcs: tuple[Arc, ...] = ()) -> Problem:
    """Entities with one choice each, which demands and supplies what is given."""
    entities = tuple(Entity(f"op {i}", "op", 2, (Choice(1.0, (0.0,), (demands,), (supplies,)),))
                     for i, (demands, supplies) in enumerate(labels))
    return Problem(entities, tuple(Edge(i, 0, i + 1, 0, 2, arcs, f"value {i}") for i in range(len(labels) - 1)))


@pytest.mark.parametrize("supplied", ["P", None])
def test_an_edge_without_a_path_is_named(supplied):
    problem = chain((None, "R"), ("S", supplied), ("R", "R"), arcs=(Arc("R", "S", 1.0),))
    with pytest.raises(Infeasible) as error:
        solve(problem)
    assert error.value.where == (f"edge 'value 1' from 'op 1' (supplies {supplied or 'nothing'}) to 'op 2' (demands R)")
    assert error.value.smallest_budget_bytes is None


def test_edges_that_can_be_met_one_by_one_but_not_together_are_found():
    """Each of the three edges alone has a path: a and b agree, b and c agree, and a and c must not."""
    def entity(name: str, ins: int, outs: int) -> Entity:
        return Entity(name, "op", 1, tuple(Choice(0.0, (0.0,), (x,) * ins, (x,) * outs) for x in ("R", "S")))

    differ = (Arc("R", "S'", 1.0), Arc("S", "R'", 1.0))
    other = Entity("c", "op", 1, tuple(Choice(0.0, (0.0,), (x, f"{x}'"), ()) for x in ("R", "S")))
    edges = (Edge(0, 0, 1, 0, 1, (), "a -> b"), Edge(1, 0, 2, 0, 1, (), "b -> c"),
             Edge(0, 0, 2, 1, 1, differ, "a -> c"))
    problem = Problem((entity("a", 0, 1), entity("b", 1, 1), other), edges, 5.0)
    assert brute_force(problem).status == "infeasible"
    with pytest.raises(Infeasible, match="no path of arcs leads from a supplied label to the demanded one") as error:
        solve(problem)
    assert error.value.where.count("edge '") == 1  # leaving out one of them is enough


def test_many_edges_without_a_path_are_counted():
    with pytest.raises(Infeasible) as error:
        solve(chain(*[("R", "S")] * 6))
    assert error.value.where.count("edge '") == 3 and error.value.where.endswith("and 2 more")
