"""Partitioning as a problem of numbers: its data model, the ILP that solves it, and the checks of its answers."""
from __future__ import annotations

from passes.solve.problem import Arc, Choice, Edge, Entity, Label, Problem, Solution
from passes.solve.search import solve
from passes.solve.solvers import SolverOptions
from passes.solve.verify import VerificationError, check

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
