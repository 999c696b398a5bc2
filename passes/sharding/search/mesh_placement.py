"""Choose placements for one placement graph on one mesh: build the problem, solve it, check the answer, decode it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from passes.cost_model.cost_terms import Prices
from passes.graph.decision import Decision
from passes.graph.layouts import Layout
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.axis import Axes
from passes.sharding.formulation.decision_decoder import decode
from passes.sharding.formulation.depth_extrapolation import extrapolate, extrapolate_cost, solution_of_shorter
from passes.sharding.formulation.placement_problem import MeshTables, PlacementProblem
from passes.sharding.formulation.problem_entities import Pin
from passes.sharding.oracle.comm_attribution import CommAttribution
from passes.sharding.oracle.cost_check import DecisionCost, recompute_cost
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.sharding.pricing.redistribution import bucket_bytes_of
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.strategies.zero_levels import ZeroRules
from passes.solver.ilp_search import solve
from passes.solver.problem import Problem, Solution
from passes.solver.solvers import SolverOptions
from passes.solver.verification import VerificationError
from passes.solver.work_limit import WorkLimit

TOLERANCE = 1e-9
BUILDING = 0.8
"""Share of the time limit for generating choices: once it is spent, groups get few of them."""


@dataclass(frozen=True)
class MeshPlacement:
    """The decision, the solver's solution, and the cost recomputed on the unfolded graph."""

    problem: PlacementProblem
    solution: Solution
    decision: Decision
    cost: DecisionCost
    solved: Problem
    """The problem that was solved: `problem` with the multiplicities of the real depth."""
    collectives: CommAttribution
    other_cost: DecisionCost | None = None
    """The cost by the prices that were not minimized."""
    frozen_by_contract: ClassVar[bool] = True
    """Problems are not changed once they are solved; see `passes.frozen`."""


def solve_on_mesh(
    graph: PlacementGraph, axes: Axes, prices: Prices, *,
    options: SolverOptions | None = None,
    state: TrainingStateModel | None = None,
    budget_bytes: float | None = None,
    stored: Mapping[str, Layout] | None = None,
    rows: frozenset[str] = frozenset(),
    zero: ZeroRules | None = None,
    pinned: Mapping[str, Pin] | None = None,
    cutoff: float | None = None,
    fold: bool = True,
    shorter: PlacementGraph | None = None, further: int = 0,
    other_prices: Prices | None = None,
    lifetimes: MemoryModel = STEP_PEAK,
    memo: MeshTables | None = None,
    allowance: WorkLimit | None = None,
) -> MeshPlacement | Solution:
    """Solve one mesh. Returns the bare `Solution` if its status is "no_solution": every answer costs more than `cutoff`, or
    none was found in time. `shorter`: the graph of the same model with one layer less; `further`: layers of the real
    model beyond `graph`; raises DepthsDiffer if the two do not correspond. `other_prices`: prices of `other_cost`.
    Prices may be anything additive, such as µJ: all costs here, and `cutoff`, are then in that unit. `memo`: see
    `PlacementProblem`. `allowance`: work limit of everything here (None: that of `options`); raises OutOfTime when it is
    spent, if strict. Raises Infeasible with the smallest feasible budget, and BadInput for pins that cannot be met.
    """
    state = state or TrainingStateModel()
    bucket_bytes, memo = bucket_bytes_of(graph, shorter, further), memo or MeshTables()
    allowance = allowance or WorkLimit((options or SolverOptions()).seconds)
    building = allowance.part(BUILDING * allowance.left_s, allowance.strict)

    def build(which: PlacementGraph, like: PlacementProblem | None = None) -> PlacementProblem:
        return PlacementProblem(
            which, axes, prices, state=state, budget_bytes=budget_bytes, stored=stored, rows=rows,
            memo=memo, fold=fold, bucket_bytes=bucket_bytes, lifetimes=lifetimes, zero=zero, pinned=pinned, like=like,
            allowance=building,
        )

    problem = build(graph)
    short = build(shorter, problem) if shorter is not None else None
    if pinned:
        _pin(problem, short, pinned)
    solved = extrapolate(problem, short, further) if short is not None else problem.problem
    solution = solve(solved, options, cutoff=cutoff, allowance=allowance)
    if solution.status == "no_solution":
        return solution
    depths = [(problem, solution)] + ([] if short is None else [(short, solution_of_shorter(problem, short, solution))])
    checked = [(each, decoded, CommAttribution(each.graph, each.groups, each.saved, decoded))
               for each, own in depths for decoded in [decode(each, own)]]
    decision = checked[0][1]

    def whole_cost(prices: Prices) -> DecisionCost:
        costs = [recompute_cost(each.graph, each.groups, each.saved, decoded, prices, state, bucket_bytes, found)
                 for each, decoded, found in checked]
        return costs[0] if len(costs) == 1 else extrapolate_cost(costs[0], costs[1], further)

    cost = whole_cost(prices)
    _verify(cost, problem, solution)
    other_cost = None if other_prices is None else whole_cost(other_prices)
    return MeshPlacement(problem, solution, decision, cost, solved, checked[0][2], other_cost)


def _verify(cost: DecisionCost, problem: PlacementProblem, solution: Solution) -> None:
    held = zip(problem.lifetimes.positions, problem.lifetimes.of(cost), solution.held_bytes, strict=True)
    for name, ours, theirs in (("objective", cost.step, solution.cost), *((f"held bytes at {p}", a, b) for p, a, b in held)):
        if abs(ours - theirs) > TOLERANCE * max(abs(ours), abs(theirs), 1.0):
            raise VerificationError(f"{name} of the unfolded graph is {ours!r}, the solver's is {theirs!r}")


def _pin(problem: PlacementProblem, shorter: PlacementProblem | None, pinned: Mapping[str, Pin]) -> None:
    """Pin both problems alike: corresponding entities may have another name in the shorter graph."""
    if shorter is not None:
        pairs = zip(shorter.entities.drafts, problem.entities.drafts)
        shorter.pin({mine.name: pinned[theirs.name] for mine, theirs in pairs if theirs.name in pinned})
    problem.pin(pinned)
