"""The placement problem as numbers: its data model, the ILP that solves it, and the checks of its answers."""
from __future__ import annotations

from passes.solver.ilp_search import solve
from passes.solver.problem import Arc, Choice, Edge, Entity, Label, Problem, Solution
from passes.solver.solvers import SolverOptions
from passes.solver.verification import VerificationError, check

__all__ = [
    "Arc",
    "Choice",
    "Edge",
    "Entity",
    "Label",
    "Problem",
    "Solution",
    "SolverOptions",
    "VerificationError",
    "check",
    "solve",
]
