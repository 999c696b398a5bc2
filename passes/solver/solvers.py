"""Run any solver that PuLP knows, by name, and read what it really proved.

PuLP's own `status` is not enough: it says "Optimal" when only the time ran out, and it does not carry the bound.
"""
from __future__ import annotations

import inspect
import itertools
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pulp

from passes.errors import BadInput, MissingDependency
from passes.solver.work_limit import US, WorkLimit

DEFAULT_TIME_LIMIT_S = 60.0
LEAST_S, LEAST_ITERATIONS = 0.1, 1000
"""Minimum time of a run, in seconds."""
BUSY = 4.0
"""HiGHS's own clock, its last limit, may show this multiple of CPU time on a busy machine."""

# What `SolverOptions.extra` may override. The MIP presolve of HiGHS 1.12 to 1.15 called wrong assignments optimal or
# infeasible, or looped for ever whatever its time limit, in some of 10,000 random problems of 20 to 50 variables; what
# it gains, `reduce` has gained before, and the relaxation is faster without it. The root's heuristic of reduced costs solves
# a program of its own, of which nothing is counted: 22 s for a detector's.
_DEFAULTS: dict[str, dict[str, Any]] = {"HiGHS": {"presolve": "off", "mip_heuristic_run_root_reduced_cost": False}}

# how to get the solvers that a package index or Debian has; PuLP's name -> what to run
_INSTALL = {
    "HiGHS": "pip install highspy",
    "HiGHS_CMD": "put HiGHS's `highs` program on the PATH, or use HiGHS (pip install highspy)",
    "COIN_CMD": "apt-get install coinor-cbc",
    "GLPK_CMD": "apt-get install glpk-utils",
    "PYGLPK": "pip install glpk",
    "SCIP_PY": "pip install pyscipopt",
    "SCIP_CMD": "put SCIP's `scip` program on the PATH, or use SCIP_PY (pip install pyscipopt)",
    "GUROBI": "pip install gurobipy",
    "CPLEX_PY": "pip install cplex",
    "MOSEK": "pip install mosek",
    "XPRESS_PY": "pip install xpress",
    "COPT": "pip install coptpy",
    "CyLP": "pip install cylp",
}


@dataclass(frozen=True)
class SolverOptions:
    """Options of a solve.

    solver: PuLP's name of it, in any case. time_limit_s: of one call, `DEFAULT_TIME_LIMIT_S` if None. gap: relative gap at
    which to stop. threads: the solver's default if None. extra: passed on to PuLP's solver by name.
    """

    solver: str = "HiGHS"
    time_limit_s: float | None = None
    gap: float = 1e-3
    threads: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise BadInput(f"time limit is {self.time_limit_s} s", "solver options", "give a positive number")
        if not 0 <= self.gap < 1:
            raise BadInput(f"gap is {self.gap}", "solver options", "give a relative gap, such as 0.001")
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads is {self.threads}", "solver options", "give 1 or more")

    @property
    def seconds(self) -> float:
        """The effective time limit."""
        return DEFAULT_TIME_LIMIT_S if self.time_limit_s is None else self.time_limit_s


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a solver; values are in the model's variables.

    state: "optimal" (within the gap), "feasible", "infeasible" or "unknown" (no values). bound: in the model's
    objective, None if the solver reports none.
    """

    state: Literal["optimal", "feasible", "infeasible", "unknown"]
    bound: float | None


class _StartedHiGHS(pulp.HiGHS):
    """PuLP's HiGHS that starts from the variables' values if `start` is set, and accepts any of HiGHS's final states."""

    start = False
    allowance: WorkLimit | None = None

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        """Pass all columns and all rows at once, where PuLP adds one after another: for some hundred rows that
        takes as long as solving."""
        import highspy

        variables, rows = lp.variables(), rows_of(lp)
        sign = -1.0 if lp.sense == pulp.LpMaximize else 1.0
        objective: Mapping[Any, float] = lp.objective or {}
        highs: Any = lp.solverModel
        highs.addCols(
            len(variables), [sign * objective.get(variable, 0.0) for variable in variables],
            [_or_infinite(variable.lowBound, -highspy.kHighsInf) for variable in variables],
            [_or_infinite(variable.upBound, highspy.kHighsInf) for variable in variables], 0, [0] * len(variables), [], [])
        integers = [k for k, variable in enumerate(variables) if variable.cat == pulp.LpInteger] if self.mip else []
        highs.changeColsIntegrality(len(integers), integers, [int(highspy.HighsVarType.kInteger)] * len(integers))
        starts, columns, values = _coefficients(lp)
        highs.addRows(
            len(rows), [_or_infinite(row.getLb(), -highspy.kHighsInf) for row in rows],
            [_or_infinite(row.getUb(), highspy.kHighsInf) for row in rows], len(columns), starts, columns, values)

    def callSolver(self, lp: pulp.LpProblem) -> None:
        import highspy

        if self.start:
            values = highspy.HighsSolution()
            values.col_value = [float(variable.varValue or 0.0) for variable in lp.variables()]
            highs: Any = lp.solverModel
            highs.setSolution(values)
        if self.threads is not None:
            highspy.Highs.resetGlobalScheduler(True)  # else HiGHS refuses another number of threads than the first
        if self.allowance is None:
            super().callSolver(lp)
        else:
            self._within(self.allowance, lp)

    def _within(self, allowance: WorkLimit, lp: pulp.LpProblem) -> None:
        """Apply a work limit: by iterations of the simplex method, or by HiGHS's interrupt callbacks, which
        it calls at the same points each time."""
        import highspy

        highs: Any = lp.solverModel
        coefficients = highs.getNumNz()
        if math.isfinite(allowance.guard_left_s):
            highs.setOptionValue("time_limit", BUSY * allowance.guard_left_s + LEAST_S)
        if not (self.mip and any(variable.cat == pulp.LpInteger for variable in lp.variables())):
            iteration_us = US["simplex iteration"] + US["simplex coefficient"] * coefficients
            most = int(max(1e6 * allowance.left_s / iteration_us, LEAST_ITERATIONS))
            highs.setOptionValue("simplex_iteration_limit", min(most, highspy.kHighsIInf))
            super().callSolver(lp)
            allowance.take(1e-6 * iteration_us * max(highs.getInfo().simplex_iteration_count, 0))
            return
        cutting_s, branching_s = (1e-6 * (US["branching"] + US[unit] * coefficients)
                                  for unit in ("cutting coefficient", "branching coefficient"))

        def ask(_kind: Any, _message: str, told: Any, answer: Any, _data: Any) -> None:
            allowance.take(branching_s if told.mip_node_count > 0 else cutting_s)
            answer.user_interrupt = allowance.is_over

        highs.setCallback(ask, None)
        highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
        super().callSolver(lp)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        """PuLP's own raises KeyError for a limit of nodes or solutions; `run` reads the proven state from HiGHS."""
        highs: Any = lp.solverModel
        for variable, value in zip(lp.variables(), highs.getSolution().col_value, strict=False):
            variable.varValue = value
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def rows_of(lp: Any) -> list[Any]:
    rows = lp.constraints
    return list(rows.values() if isinstance(rows, dict) else rows())  # a dictionary before PuLP 3.3


def _coefficients(lp: Any) -> tuple[list[int], list[int], list[float]]:
    """Nonzero coefficients by row: where each row starts, their columns and values. Kept in `lp.written`, if it has that."""
    rows, written = rows_of(lp), getattr(lp, "written", None)
    if written is not None and len(written[0]) == len(rows):
        return written
    index = {id(variable): k for k, variable in enumerate(lp.variables())}
    terms = [[(index[id(variable)], value) for variable, value in row.items() if value != 0] for row in rows]
    flat = list(itertools.chain.from_iterable(terms))
    starts = list(itertools.accumulate(map(len, terms), initial=0))[:-1]
    found = starts, [k for k, _ in flat], [value for _, value in flat]
    if hasattr(lp, "written"):
        lp.written = found
    return found


def _or_infinite(bound: float | None, infinite: float) -> float:
    return infinite if bound is None else bound


def check_options(options: SolverOptions) -> str:
    """PuLP's spelling of the solver's name. Raises `BadInput` (unknown solver or option) or `MissingDependency`."""
    legal = sorted(set(pulp.listSolvers()))
    _check_common(options.extra)
    name = next((known for known in legal if known.lower() == options.solver.lower()), None)
    if name is None:
        raise BadInput(f"unknown solver {options.solver!r}", "solver options", "use one of " + ", ".join(legal))
    try:
        available = _make(name, {"msg": False}).available()
    except (pulp.PulpError, OSError):
        available = False
    if not available:
        how = _INSTALL.get(name, f"install the program or package that PuLP runs as {name}")
        here = ", ".join(sorted(pulp.listSolvers(onlyAvailable=True)))
        raise MissingDependency(f"solver {name} is not installed", "solver options", f"{how}; installed here: {here}")
    if name == "HiGHS" and options.extra:
        _check_highs_options(options.extra)
    return name


def run(model: pulp.LpProblem, options: SolverOptions, *, integer: bool, allowance: WorkLimit, start: bool) -> Outcome:
    """Solve `model` within `options.gap`; the values are left in its variables.

    integer: True if it has integer variables. allowance: for this run and later ones; solvers other than HiGHS enforce
    the remaining time by their own clocks. start: its variables hold a feasible assignment for a warm start, if supported.

    Raises `BadInput` if the solver does not accept an option of `options.extra` or aborts.
    """
    name = check_options(options)
    seconds = None if name == "HiGHS" else max(allowance.left_s, LEAST_S)
    wanted = {"msg": False, "timeLimit": seconds, "gapRel": options.gap, "gapAbs": 0.0,
              "threads": options.threads, "warmStart": start}
    known = inspect.signature(_solver_class(name).__init__).parameters
    settings = {key: value for key, value in wanted.items() if key in known and value is not None}
    try:
        solver = _make(name, {**settings, **_DEFAULTS.get(name, {}), **options.extra})
    except TypeError as error:
        legal = ", ".join(key for key in known if key != "self")
        raise BadInput(f"solver {name} does not take these options: {error}", f"solver options {dict(options.extra)}",
                       f"use {legal}") from error
    if isinstance(solver, _StartedHiGHS):
        solver.start, solver.allowance = start, allowance
    began = sum(os.times()[:4])
    try:
        model.solve(solver)
    except pulp.PulpError as error:
        raise BadInput(f"solver {name} broke off: {error}", "solving the placement ILP",
                       "add {'msg': True} to the solver options to see its log, or use the solver HiGHS") from error
    if isinstance(solver, _StartedHiGHS):
        return _outcome_of_highs(model.solverModel, integer)
    allowance.take(sum(os.times()[:4]) - began)  # user and system time, including child processes
    if model.status == pulp.LpStatusInfeasible:
        return Outcome("infeasible", None)
    states: dict[int, Literal["optimal", "feasible"]] = {
        pulp.LpSolutionOptimal: "optimal",
        pulp.LpSolutionIntegerFeasible: "feasible",
    }
    return Outcome(states.get(model.sol_status, "unknown"), None)


def _solver_class(name: str) -> Any:
    return _StartedHiGHS if name == "HiGHS" else type(_instance(name, {"msg": False}))


def _instance(name: str, settings: Mapping[str, Any]) -> Any:
    with warnings.catch_warnings():  # PULP_CBC_CMD warns that a later PuLP drops it; whoever names it knows that
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.getSolver(name, **settings)


def _make(name: str, settings: Mapping[str, Any]) -> Any:
    return _StartedHiGHS(**settings) if name == "HiGHS" else _instance(name, settings)


def _check_common(extra: Mapping[str, Any]) -> None:
    """Check options that PuLP itself reads, and passes on or ignores unchecked."""
    for key, own in (("timeLimit", "time_limit"), ("gapRel", "gap")):
        if key in extra:
            raise BadInput(f"{key} has a name of its own here", "solver options", f"give {own} in its place")
    threads = extra.get("threads", 1)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise BadInput(f"threads is {threads!r}, not a whole number of at least 1", "solver options", 'write {"threads": 1}')
    for key in ("msg", "warmStart", "mip", "keepFiles"):
        if not isinstance(extra.get(key, True), (bool, int)):
            raise BadInput(f"{key} is {extra[key]!r}, not true or false", "solver options", f'write {{"{key}": true}}')


def _check_highs_options(extra: Mapping[str, Any]) -> None:
    import highspy

    known = inspect.signature(pulp.HiGHS.__init__).parameters
    probe = highspy.Highs()
    probe.setOptionValue("output_flag", False)
    for key, value in extra.items():
        if key not in known and probe.setOptionValue(key, value) != highspy.HighsStatus.kOk:
            raise BadInput(f"HiGHS does not take {key}={value!r}", "solver options",
                           "see https://ergo-code.github.io/HiGHS/dev/options/definitions/ for names and values")


def _outcome_of_highs(highs: Any, integer: bool) -> Outcome:
    import highspy

    status, info = highs.getModelStatus(), highs.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Outcome("infeasible", None)  # never unbounded: no cost is negative
    if status == highspy.HighsModelStatus.kOptimal:
        return Outcome("optimal", info.mip_dual_bound if integer else info.objective_function_value)
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Outcome("feasible" if feasible else "unknown", info.mip_dual_bound if integer else None)
