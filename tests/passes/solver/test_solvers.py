from __future__ import annotations

import math
import random
import subprocess
import sys

import pulp
import pytest

from passes.errors import BadInput, MissingDependency
from passes.solver import SolverOptions, solve, solvers
from tests.passes.solver.random_problems import hard_chain


def test_an_unknown_solver_lists_the_legal_ones():
    with pytest.raises(BadInput, match="unknown solver 'Simplex9000'") as error:
        solve(hard_chain(), SolverOptions("Simplex9000"))
    assert set(pulp.listSolvers()) <= set(error.value.next_step.removeprefix("use one of ").split(", "))


def test_a_solver_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr(pulp.GLPK_CMD, "available", lambda self: False)
    with pytest.raises(MissingDependency, match="GLPK_CMD is not installed") as error:
        solve(hard_chain(), SolverOptions("glpk_cmd"))
    assert "apt-get install glpk-utils" in error.value.next_step
    assert "HiGHS" in error.value.next_step


def test_names_are_taken_in_any_case():
    assert solvers.check_options(SolverOptions("highs")) == "HiGHS"


@pytest.mark.parametrize("options", [{"time_limit_s": 0}, {"gap": -0.1}, {"gap": 1.0}, {"threads": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(BadInput) as error:
        SolverOptions(**options)
    assert error.value.where == "solver options"


@pytest.mark.parametrize("extra", [{"no_such_option": 1}, {"presolve": "sometimes"}])
def test_an_option_that_highs_does_not_know_is_refused(extra):
    with pytest.raises(BadInput, match=next(iter(extra))):
        solve(hard_chain(), SolverOptions(extra=extra))


def test_an_option_that_a_program_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(pulp.GLPK_CMD, "available", lambda self: True)
    with pytest.raises(BadInput, match="GLPK_CMD does not take these options") as error:
        solve(hard_chain(), SolverOptions("GLPK_CMD", extra={"no_such_option": 1}))
    assert "timeLimit" in error.value.next_step


def test_options_reach_highs(monkeypatch):
    seen = {}
    original = pulp.HiGHS.callSolver

    def spy(self, lp):
        for name in ("presolve", "mip_rel_gap", "threads"):
            seen[name] = lp.solverModel.getOptionValue(name)[1]
        return original(self, lp)

    monkeypatch.setattr(pulp.HiGHS, "callSolver", spy)
    solve(hard_chain(), SolverOptions(gap=0.03, threads=1, time_limit_s=20, extra={"presolve": "off"}))
    assert (seen["presolve"], seen["mip_rel_gap"], seen["threads"]) == ("off", 0.03, 1)


def test_the_number_of_threads_may_change_between_solves():
    found = [solve(hard_chain(), SolverOptions(gap=0.01, threads=threads)).status for threads in (1, 2, None, 1)]
    assert found == ["optimal"] * 4


def test_highs_starts_from_the_best_assignment_so_far(monkeypatch):
    started = []
    original = pulp.HiGHS.callSolver

    def spy(self, lp):
        original(self, lp)
        if self.start:
            started.append(lp.solverModel.getInfo().objective_function_value)

    monkeypatch.setattr(pulp.HiGHS, "callSolver", spy)
    # a limit of no node: what the solver returns is what it was given, or better
    solution = solve(hard_chain(), SolverOptions(gap=0.0, extra={"mip_max_nodes": 0, "mip_heuristic_effort": 0.0}))
    assert started and math.isfinite(started[0])
    assert solution.status == "feasible"


def test_a_failing_solver_is_reported(monkeypatch):
    def broken(self, lp):
        raise pulp.PulpSolverError("no license")

    monkeypatch.setattr(pulp.HiGHS, "callSolver", broken)
    with pytest.raises(BadInput, match="HiGHS broke off: no license"):
        solve(hard_chain())


def test_the_package_needs_no_torch():
    code = "import sys, passes.sharding, passes.solver.solvers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("seed", range(5))
def test_highs_gets_the_same_program_as_from_pulp(seed):
    draw = random.Random(seed)
    program = pulp.LpProblem("any", pulp.LpMaximize if seed % 2 else pulp.LpMinimize)
    x = [program.add_variable(f"x{k}", draw.choice([None, 0]), draw.choice([None, 1, 5]),
                              draw.choice([pulp.LpInteger, pulp.LpContinuous])) for k in range(9)]
    program.setObjective(pulp.LpAffineExpression({each: draw.randint(-2, 5) for each in x[:6]}))
    for row in range(6):
        held = pulp.LpAffineExpression({each: draw.choice([0, 1, 2.5, -1]) for each in draw.sample(x, 4)}, draw.randint(-2, 2))
        program.addConstraint(held <= 3 if row % 3 == 0 else held >= -5 if row % 3 == 1 else held == 0, f"row_{row}")
    theirs, ours = (told_to_highs(program, highs(msg=False)) for highs in (pulp.HiGHS, solvers._StartedHiGHS))
    assert ours == theirs


def told_to_highs(program, solver):
    solver.createAndConfigureSolver(program)
    solver.buildSolverModel(program)
    model = program.solverModel.getLp()
    matrix = model.a_matrix_
    return [list(part) for part in (model.col_cost_, model.col_lower_, model.col_upper_, model.row_lower_, model.row_upper_,
                                    model.integrality_, matrix.start_, matrix.index_, matrix.value_)]


FRAMES = """
import gc, weakref
class Local: ...
def imports():
    local = Local()
    import {}
    return weakref.ref(local)
found = imports()
gc.collect()
raise SystemExit(found() is not None)
"""


@pytest.mark.parametrize(("module", "stay"), [("pulp", True), ("passes.checkpointing.checkpoint_ilp", False)])
def test_the_frames_of_an_import_are_freed(module, stay):
    """The first case says when a new PuLP makes this unnecessary."""
    assert subprocess.run([sys.executable, "-c", FRAMES.format(module)]).returncode == stay
