"""Solve a placement problem: reduce, relax, round, and branch only if that leaves a gap; every answer is verified."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from passes.solver import ilp, solvers, verification
from passes.solver.infeasibility import explain
from passes.solver.problem import Problem, Solution
from passes.solver.reduction import NoAssignment, Reduced, cap, reduce, sizes_of
from passes.solver.rounding import rounded
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

_ROUNDING = 1e-9  # relative gap of sums of floats added up in another order
_TOLERANCE = 1e-6  # relative gap that a solver's own tolerances leave of a proof
LEAST_TO_EXPLAIN_S = 1.0


def solve(problem: Problem, options: SolverOptions | None = None, *, cutoff: float | None = None,
          allowance: WorkLimit | None = None) -> Solution:
    """The cheapest assignment of `problem`, proven within `options.gap` if the time suffices, and verified.

    cutoff: assignments that cost more are of no use; when the bound of the reduction or of the relaxation shows
    that all do, the answer is "no_solution" with that bound.
    allowance: for the search; `options.time_limit_s` if None. Raises OutOfTime where it is strict.
    Raises `Infeasible` if no assignment meets every edge and the budget; where a larger budget would do, the error has
    the attribute `smallest_budget_bytes`. Raises `BadInput` for solver options and `MissingDependency` for a solver
    that is not installed.
    """
    options = options or SolverOptions()
    allowance = allowance or WorkLimit(options.seconds)
    try:
        return _find(problem, options, allowance, math.inf if cutoff is None else cutoff)
    except NoAssignment:
        rest = allowance.part(max(allowance.left_s, LEAST_TO_EXPLAIN_S))
        raise explain(problem, replace(options, gap=0.0), rest, _find) from None


def _find(problem: Problem, options: SolverOptions, allowance: WorkLimit, cutoff: float = math.inf) -> Solution:
    """Like `solve`, but raises `NoAssignment` where that raises `Infeasible`."""
    solution = _AssignmentSearch(problem, options, allowance, solvers.check_options(options), time.perf_counter()).run(cutoff)
    verification.check(problem, solution)
    return solution


@dataclass
class _AssignmentSearch:
    """One run of `solve`; keeps the best assignment and bound so far."""

    problem: Problem
    options: SolverOptions
    allowance: WorkLimit
    solver: str
    began: float
    model: ilp.PlacementILP | None = None
    best: list[int] | None = None
    best_cost: float = math.inf
    bound: float = 0.0
    integral_relaxation: bool = False
    fractional: int | None = None
    """Fractional choices of the relaxation's optimum, None until it is known."""

    def run(self, cutoff: float) -> Solution:
        candidates, comparisons = sizes_of(self.problem)
        self.allowance.spend("candidate", candidates)
        self.allowance.spend("comparison", comparisons)
        reduced = reduce(self.problem)
        self._raise_bound(reduced.lower_bound)
        if self.bound <= cutoff:
            self._offer(reduced, rounded(reduced, allowance=self.allowance))
            if self.best is not None:
                self.best = cap(reduced, self.best, self.best_cost)
                self._raise_bound(reduced.lower_bound)
            if any(len(left) > 1 for left in reduced.candidates):
                self._use_solver(reduced, cutoff)
            elif self.best is None:
                raise NoAssignment
        if self.bound > cutoff:
            self.best, self.best_cost = None, math.inf
        return self._solution(reduced)

    def _use_solver(self, reduced: Reduced, cutoff: float) -> None:
        if self._done(self.options.gap):
            return
        coefficients = ilp.coefficients(reduced)
        if self.best is not None and not self.allowance.allows("coefficient", coefficients):
            return
        self.allowance.spend("coefficient", coefficients)
        self.model = ilp.build(reduced, None if self.best is None else self.best_cost)
        self._relax(self.model)
        if self.bound <= cutoff and not self._done(self.options.gap) and self._may_branch(self.model):
            self._branch(self.model)

    def _may_branch(self, model: ilp.PlacementILP) -> bool:
        """True if the time suffices for the root node, which HiGHS ends before it looks at a limit. Without any assignment yet
        it is tried whatever its size."""
        fractional = model.binaries if self.fractional is None else self.fractional
        return self.best is None or self.allowance.allows("separation", fractional * ilp.coefficients(model.reduced))

    def _relax(self, model: ilp.PlacementILP) -> None:
        """Solve the relaxation, for its bound and for the assignments near it."""
        outcome = self._solver_run(model, integer=False)
        if outcome.state == "infeasible" and self.best is None:
            raise NoAssignment
        if outcome.state != "optimal":
            return
        self._raise_bound(model.cost())
        picked = model.picked()
        self.fractional = model.fractional()
        self._offer(model.reduced, picked)
        self.integral_relaxation = not self.fractional and self._done(0.0)
        if not self._done(0.0):
            self._offer(model.reduced, rounded(model.reduced, picked, self.allowance))

    def _branch(self, model: ilp.PlacementILP) -> None:
        """Solve the integer program, again if its solution fits the budget only within the solver's tolerance."""
        while not self.allowance.is_over:
            outcome = self._solver_run(model, integer=True)
            if outcome.state == "infeasible" and self.best is None:
                raise NoAssignment
            if outcome.bound is not None and math.isfinite(outcome.bound):
                self._raise_bound(outcome.bound * model.unit)
            if outcome.state in ("infeasible", "unknown"):
                return
            picked = model.picked()
            exceeded = self._exceeded(model.reduced, picked)
            if not exceeded:
                self._offer(model.reduced, picked)
                if outcome.state == "optimal" and outcome.bound is None:
                    self._raise_bound(model.cost() * (1 - self.options.gap))
                return
            for position in exceeded:
                ilp.cover(model, picked, position)

    def _solver_run(self, model: ilp.PlacementILP, integer: bool) -> solvers.Outcome:
        model.set_integer(integer)
        start = self.best if integer else None
        if start is not None:
            model.set_values(start)
        return solvers.run(model.program, self.options, integer=integer, start=start is not None,
                           allowance=self.allowance)

    def _exceeded(self, reduced: Reduced, picked: list[int]) -> list[int]:
        """Indices of the positions that exceed the budget."""
        budget = self.problem.budget_bytes
        if budget is None:
            return []
        return [k for k, held in enumerate(self.problem.held_bytes(reduced.original(picked))) if held > budget]

    def _offer(self, reduced: Reduced, picked: list[int] | None) -> None:
        """Keep `picked` if it is an assignment, within the budget, and better than the best so far."""
        if picked is not None and not self._exceeded(reduced, picked):
            cost = self._cost(reduced, picked)
            if cost < self.best_cost:
                self.best, self.best_cost = list(picked), cost

    def _cost(self, reduced: Reduced, picked: list[int]) -> float:
        """Exact cost, from the problem's own numbers; inf if an edge has no path."""
        chosen = reduced.original(picked)
        terms = [entity.multiplicity * entity.choices[choice].cost
                 for entity, choice in zip(self.problem.entities, chosen, strict=True)]
        for edge, paths in zip(self.problem.edges, reduced.paths, strict=True):
            source = paths.index[self.problem.supplied(edge, chosen[edge.source])]
            target = paths.index[self.problem.demanded(edge, chosen[edge.target])]
            cost = float(paths.cost[source, target])
            terms.append(edge.multiplicity * cost if math.isfinite(cost) else cost)
        return math.fsum(terms)

    def _raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _done(self, gap: float) -> bool:
        return self.best is not None and self.best_cost - self.bound <= max(gap, _ROUNDING) * self.best_cost

    def _solution(self, reduced: Reduced) -> Solution:
        chosen = () if self.best is None else reduced.original(self.best)
        paths = [
            table.path(self.problem.supplied(edge, chosen[edge.source]),
                       self.problem.demanded(edge, chosen[edge.target]))
            for edge, table in zip(self.problem.edges, reduced.paths, strict=True)
        ] if self.best is not None else []
        within_gap = self._done(max(self.options.gap, _TOLERANCE))
        proven = self.best is not None and abs(self.best_cost - self.bound) <= _TOLERANCE * self.best_cost
        gap = 0.0 if proven else 1.0 if self.best is None else (self.best_cost - self.bound) / self.best_cost
        return Solution(
            status="no_solution" if self.best is None else "optimal" if within_gap else "feasible",
            chosen=chosen,
            paths=tuple(paths),
            cost=self.best_cost,
            bound=self.best_cost if proven else self.bound,
            gap=gap,
            held_bytes=self.problem.held_bytes(chosen) if self.best is not None else (math.inf,) * len(self.problem.positions),
            variables=self.model.variables if self.model else 0,
            binaries=self.model.binaries if self.model else 0,
            constraints=self.model.constraints if self.model else 0,
            seconds=time.perf_counter() - self.began,
            solver=self.solver,
            integral_relaxation=self.integral_relaxation,
        )
