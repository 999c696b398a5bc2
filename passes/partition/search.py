"""Solves a partition problem: reduce, relax, round, and branch only if that leaves a gap; every answer is verified."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass

from passes.partition import ilp, solvers, verify
from passes.partition.infeasible import explain
from passes.partition.problem import Problem, Solution
from passes.partition.reduce import NoAssignment, Reduced, reduce
from passes.partition.rounding import rounded
from passes.partition.solvers import SolverOptions

_ROUNDING = 1e-9  # relative gap of sums of floats added up in another order
_TOLERANCE = 1e-6  # relative gap that a solver's own tolerances leave of a proof


def solve(problem: Problem, options: SolverOptions | None = None, *, cutoff_us: float | None = None) -> Solution:
    """The cheapest assignment of `problem`, proven within `options.gap` if the time suffices, and verified.

    cutoff_us: an assignment that costs more is of no use; when the bound already says so, the answer is "no_solution" with
    that bound. Raises `Infeasible` (no assignment meets every edge and the budget; with a budget the error has the
    attribute `smallest_budget_bytes`), `BadInput` (solver options) and `MissingDependency` (solver not installed).
    """
    options = options or SolverOptions()
    search = _Search(problem, options, solvers.check_options(options), time.perf_counter())
    try:
        solution = search.run(math.inf if cutoff_us is None else cutoff_us)
    except NoAssignment:
        raise explain(problem, options, solve) from None
    verify.check(problem, solution)
    return solution


@dataclass
class _Search:
    """One run of `solve`; remembers the best assignment and bound so far."""

    problem: Problem
    options: SolverOptions
    solver: str
    began: float
    model: ilp.Model | None = None
    best: list[int] | None = None
    best_us: float = math.inf
    bound_us: float = 0.0
    integral_relaxation: bool = False

    def run(self, cutoff_us: float) -> Solution:
        reduced = reduce(self.problem)
        self.bound_us = reduced.lower_bound_us
        if all(len(left) == 1 for left in reduced.candidates):
            self._offer(reduced, [0] * len(reduced.candidates))
            if self.best is None:
                raise NoAssignment
        elif self.bound_us <= cutoff_us:
            self.model = ilp.build(reduced)
            self._relax(self.model)
            if self.bound_us <= cutoff_us and not self._done(self.options.gap):
                self._branch(self.model)
        return self._solution(reduced)

    def _relax(self, model: ilp.Model) -> None:
        """Solve the relaxation, for its bound and for the assignments near it."""
        model.set_integer(False)
        outcome = self._solver_run(model, start=False)
        if outcome.state == "infeasible":
            raise NoAssignment
        start = [0] * len(model.choices)
        if outcome.state == "optimal":
            self.bound_us = max(self.bound_us, model.objective_us())
            start = model.picked()
            self._offer(model.reduced, start)
            self.integral_relaxation = model.is_integral() and self._done(0.0)
        if not self._done(0.0):
            self._offer(model.reduced, rounded(model.reduced, start))

    def _branch(self, model: ilp.Model) -> None:
        """Solve the integer program, again where its solution fits the budget only within the solver's tolerance."""
        model.set_integer(True)
        while self._seconds_left() > 0:
            if self.best is not None:
                model.set_values(self.best)
            outcome = self._solver_run(model, start=self.best is not None)
            if outcome.state == "infeasible":
                if self.best is None:
                    raise NoAssignment
                self.bound_us = self.best_us  # all that is left is excluded by covers
                return
            if outcome.bound is not None and math.isfinite(outcome.bound):
                self.bound_us = max(self.bound_us, outcome.bound * model.unit_us)
            if outcome.state == "unknown":
                return
            picked = model.picked()
            if self._fits(model.reduced, picked):
                self._offer(model.reduced, picked)
                if outcome.state == "optimal" and outcome.bound is None:
                    self.bound_us = max(self.bound_us, model.objective_us() * (1 - self.options.gap))
                return
            ilp.cover(model, picked)

    def _solver_run(self, model: ilp.Model, start: bool) -> solvers.Outcome:
        return solvers.run(model.program, self.options, gap=self.options.gap,
                           time_limit_s=max(self._seconds_left(), 0.1), start=start)

    def _seconds_left(self) -> float:
        return self.options.seconds - (time.perf_counter() - self.began)

    def _fits(self, reduced: Reduced, picked: list[int]) -> bool:
        budget = self.problem.budget_bytes
        return budget is None or self.problem.held_bytes(reduced.original(picked)) <= budget

    def _offer(self, reduced: Reduced, picked: list[int] | None) -> None:
        """Remember `picked` if it is an assignment, within the budget, and better than the best so far."""
        if picked is not None and self._fits(reduced, picked):
            objective_us = self._objective_us(reduced, picked)
            if objective_us < self.best_us:
                self.best, self.best_us = list(picked), objective_us

    def _objective_us(self, reduced: Reduced, picked: list[int]) -> float:
        """Exact, from the problem's own numbers; inf if an edge has no path."""
        chosen = reduced.original(picked)
        terms = [entity.multiplicity * entity.choices[choice].cost_us
                 for entity, choice in zip(self.problem.entities, chosen, strict=True)]
        for edge, paths in zip(self.problem.edges, reduced.paths, strict=True):
            source = paths.index[self.problem.supplied(edge, chosen[edge.source])]
            target = paths.index[self.problem.demanded(edge, chosen[edge.target])]
            cost = float(paths.cost[source, target])
            terms.append(edge.multiplicity * cost if math.isfinite(cost) else cost)
        return math.fsum(terms)

    def _done(self, gap: float) -> bool:
        return self.best is not None and self.best_us - self.bound_us <= max(gap, _ROUNDING) * self.best_us

    def _solution(self, reduced: Reduced) -> Solution:
        chosen = () if self.best is None else reduced.original(self.best)
        paths = [
            table.path(self.problem.supplied(edge, chosen[edge.source]), self.problem.demanded(edge, chosen[edge.target]))
            for edge, table in zip(self.problem.edges, reduced.paths, strict=True)
        ] if self.best is not None else []
        proven = self._done(_TOLERANCE)
        gap = 0.0 if proven else 1.0 if self.best is None else (self.best_us - self.bound_us) / self.best_us
        return Solution(
            status="no_solution" if self.best is None else "optimal" if self._done(max(self.options.gap, _TOLERANCE)) else "feasible",
            chosen=chosen,
            paths=tuple(paths),
            objective_us=self.best_us,
            bound_us=self.best_us if proven else self.bound_us,
            gap=gap,
            held_bytes=self.problem.held_bytes(chosen) if self.best is not None else math.inf,
            variables=self.model.variables if self.model else 0,
            binaries=self.model.binaries if self.model else 0,
            constraints=self.model.constraints if self.model else 0,
            seconds=time.perf_counter() - self.began,
            solver=self.solver,
            integral_relaxation=self.integral_relaxation,
        )
