from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.solver import Arc, Choice, Edge, Entity, Problem, SolverOptions, ilp, solvers
from passes.solver.exhaustive_search import brute_force
from passes.solver.reduction import reduce, unreduced
from passes.solver.work_limit import WorkLimit
from tests.passes.solver.random_problems import hard_chain, problems, tangled

EXACT = SolverOptions(gap=0.0)


def run(model: ilp.PlacementILP, integer: bool) -> solvers.Outcome:
    model.set_integer(integer)
    return solvers.run(model.program, EXACT, integer=integer, allowance=WorkLimit(30.0), start=False)


@pytest.fixture
def shared_value() -> Problem:
    """A value with two users, one of which may do without it; nothing of it is settled by the reduction."""
    producer = tuple(Choice(cost, (2e9,), (), (label,)) for cost, label in ((30.0, "R"), (10.0, "S(0), R")))
    reader = tuple(Choice(cost, (held,), (label,), ())
                   for cost, held, label in ((9.0, 1e9, "R"), (3.0, 2e9, "S(0), R"), (4.0, 2e9, "P")))
    maybe = (Choice(20.0, (0.0,), (None,), ()), Choice(1.0, (3e9,), ("R",), ()), Choice(0.0, (4e9,), ("P",), ()))
    arcs = (Arc("R", "S(0), R", 1.0), Arc("S(0), R", "R", 25.0), Arc("R", "P", 2.0), Arc("P", "S(0), R", 11.0),
            Arc("S(0), R", "P", 40.0))
    entities = (Entity("layers.0/mlp up[0]", "op", 2, producer), Entity("reader", "op", 2, reader),
                Entity("maybe", "op", 1, maybe))
    edges = (Edge(0, 0, 1, 0, 2, arcs, "up -> reader"), Edge(0, 0, 2, 0, 1, arcs, "up -> maybe"))
    return Problem(entities, edges, 9e9)


@settings(max_examples=150, deadline=None)
@given(st.one_of(problems(budgets=False), st.integers(0, 10**6).map(tangled)))
def test_the_formulation_alone_finds_the_optimum(problem):
    """Without any reduction; edges from an entity to itself and decided entities are the reduction's to settle."""
    if any(len(e.choices) == 1 for e in problem.entities) or any(e.source == e.target for e in problem.edges):
        return
    model = ilp.build(unreduced(problem))
    outcome = run(model, integer=True)
    optimum = brute_force(problem)
    if optimum.status == "infeasible":
        assert outcome.state == "infeasible"
    else:
        assert outcome.state == "optimal"
        # The solver's tolerance is absolute, in its own unit.
        tolerance = 2e-6 * max(model.unit, 1.0)
        assert math.isclose(model.cost(), optimum.cost, rel_tol=1e-6, abs_tol=tolerance)
        run(model, integer=False)
        assert model.cost() <= optimum.cost * (1 + 1e-6) + tolerance


def test_an_lp_dump_can_be_read(shared_value, tmp_path):
    model = ilp.build(unreduced(shared_value))
    path = tmp_path / "placement.lp"
    model.program.writeLP(path)
    text = path.read_text().replace("\n ", " ")  # rows are wrapped
    for family, rows in {"one_choice": 3, "flow": 6, "budget": 1}.items():
        assert len(re.findall(rf"^{family}_\w", text, re.MULTILINE)) == rows, text
    assert "one_choice_0_layers.0_mlp_up_0:" in text
    assert re.search(r"^one_choice_0_layers.0_mlp_up_0: x_0_layers.0_mlp_up_0_0 \+ x_0_layers.0_mlp_up_0_1 = 1$", text,
                     re.MULTILINE)
    assert re.search(r"^flow_0_up_reader_\d_P: .* = 0$", text, re.MULTILINE)  # every choice of the reader takes a label
    assert re.search(r"^flow_1_up_maybe_\d_P: .* >= 0$", text, re.MULTILINE)  # one takes nothing
    assert re.search(r"f_0_up_reader_\d_R_S_0_R\b", text)
    assert re.search(r"^budget_0_step_GiB: ", text, re.MULTILINE)
    assert model.variables == len(model.program.variables())
    assert (model.binaries, model.constraints) == (8, 10)


def test_every_family_is_documented_and_built_by_the_function_of_its_name(shared_value):
    numbered = re.findall(r"^    \((\d)\) (\w+)", ilp.__doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in numbered] == [1, 2, 3, 4]
    model = ilp.build(unreduced(shared_value))
    ilp.cover(model, [0, 1, 2], 0)
    rows = [row for row in model.program.toDict()["constraints"]]
    assert {family for _, family in numbered} == {re.split(r"_[\dG]", row["name"])[0] for row in rows}
    for number, family in numbered:
        assert (getattr(ilp, family).__doc__ or "").startswith(f"({number})")


def test_dominated_arcs_are_not_built(shared_value):
    model = ilp.build(unreduced(shared_value))
    built = {(arc.source, arc.target) for arc, _ in model.arcs[0]}
    assert ("S(0), R", "P") not in built  # 25 + 2 through R is cheaper than 40
    assert ("R", "S(0), R") in built


def test_values_set_from_an_assignment_are_feasible(shared_value):
    optimum = brute_force(shared_value)
    model = ilp.build(unreduced(shared_value))
    model.set_values(optimum.chosen)
    assert all(variable.varValue is not None for variable in model.program.variables())
    assert model.program.valid(1e-9)
    assert math.isclose(model.cost(), optimum.cost, rel_tol=1e-12)
    assert model.picked() == list(optimum.chosen) and not model.fractional()


def test_a_cover_excludes_its_assignment_alone(shared_value):
    optimum = brute_force(shared_value)
    model = ilp.build(unreduced(shared_value))
    ilp.cover(model, optimum.chosen, 0)
    assert run(model, integer=True).state == "optimal"
    assert model.picked() != list(optimum.chosen)
    second = min(
        brute_force(Problem(
            tuple(Entity(e.name, e.kind, e.multiplicity, e.choices[:c] + e.choices[c + 1:]) if i == entity else e
                  for i, e in enumerate(shared_value.entities)),
            shared_value.edges, shared_value.budget_bytes)).cost
        for entity, c in enumerate(optimum.chosen) if shared_value.entities[entity].choices[c].held_bytes[0] > 0)
    assert math.isclose(model.cost(), second, rel_tol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_the_objective_is_scaled(shared_value, scale):
    entities = tuple(
        Entity(e.name, e.kind, e.multiplicity,
               tuple(Choice(c.cost * scale, c.held_bytes, c.inputs, c.outputs) for c in e.choices))
        for e in shared_value.entities
    )
    model = ilp.build(unreduced(Problem(entities, shared_value.edges)), expected=60 * scale)
    assert 5e4 <= 60 * scale / model.unit <= 2e5
    assert math.log2(model.unit).is_integer()


def test_what_is_decided_needs_no_variable():
    problem = hard_chain(9)
    layers = list(problem.entities)
    layers[4] = Entity("decided", "op", 1, layers[4].choices[:1])
    reduced = reduce(Problem(tuple(layers), problem.edges, problem.budget_bytes))
    model = ilp.build(reduced)
    assert model.choices[4] == [] and all(len(choices) > 1 for i, choices in enumerate(model.choices) if i != 4)
    assert list(model.arcs) == [0, 1, 2, 5, 6, 7]  # the edges at it are settled
    assert math.isclose(model.program.objective[model.decided] * model.unit, float(reduced.costs[4][0]))
    rows = model.program.toDict()["constraints"]
    assert [row["name"] for row in rows if "budget" in row["name"]] == ["budget_0_step_MiB"]
    budget = next(row for row in rows if row["name"] == "budget_0_step_MiB")
    assert math.isclose(-budget["constant"] * 2**20, problem.budget_bytes - layers[4].choices[0].held_bytes[0])
