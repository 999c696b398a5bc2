from __future__ import annotations

import dataclasses
import math

import pytest

from passes.errors import BadInput
from passes.solver import Arc, Choice, Edge, Entity, Problem


def make(choice: Choice | None = None, **changes) -> Problem:
    """Two entities and an edge; `changes` go into the edge, `choice` replaces the source's second choice."""
    choices = (Choice(1.0, (10.0,), (), ("R",)), choice or Choice(2.0, (5.0,), (), ("S(0)",)))
    source = Entity("weight", "parameter", 3, choices)
    target = Entity("matmul", "op", 1, (Choice(4.0, (0.0,), ("R",), ()), Choice(3.0, (0.0,), (None,), ())))
    edge = Edge(0, 0, 1, 0, 3, (Arc("S(0)", "R", 7.0),), "weight -> matmul")
    return Problem((source, target), (dataclasses.replace(edge, **changes),))


def test_labels_and_bytes_follow_the_choices():
    problem = make()
    edge = problem.edges[0]
    assert [problem.supplied(edge, choice) for choice in (0, 1)] == ["R", "S(0)"]
    assert [problem.demanded(edge, choice) for choice in (0, 1)] == ["R", None]
    assert problem.held_bytes((1, 0)) == (3 * 5.0,)


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        ({"target": 2}, "target is entity 2, but there are 2 entities", "edge 0 'weight -> matmul'"),
        ({"source_port": 1}, "out-port 1 does not exist: entity 'weight' has 1", "edge 0"),
        ({"target_port": -1}, "in-port -1 does not exist: entity 'matmul' has 1", "edge 0"),
        ({"multiplicity": -1}, "multiplicity is -1", "edge 0"),
        ({"arcs": (Arc("R", "P", -1.0),)}, "cost of arc R -> P is -1.0", "edge 0"),
        ({"choice": Choice(math.nan, (0.0,), (), ("R",))}, "cost of choice 1 is nan", "entity 0 'weight'"),
        ({"choice": Choice(0.0, (math.inf,), (), ("R",))}, "held_bytes of choice 1 is inf", "entity 0"),
        ({"choice": Choice(0.0, (0.0, 1.0), (), ("R",))}, "choice 1 holds bytes at 2 positions, the problem has 1", "entity 0"),
        ({"choice": Choice(0.0, (0.0,), ("R",), ("R",))}, "choice 1 has 1 in-ports and 1 out-ports", "entity 0"),
    ],
)
def test_a_malformed_problem_is_refused(change, what, where):
    with pytest.raises(BadInput) as error:
        make(**change)
    assert what in error.value.what
    assert where in error.value.where
    assert error.value.next_step


def test_an_entity_needs_a_choice_and_a_budget_a_size():
    with pytest.raises(BadInput, match="no choices"):
        Problem((Entity("empty", "op", 1, ()),), ())
    with pytest.raises(BadInput, match="budget_bytes is -1"):
        Problem((), (), -1)
