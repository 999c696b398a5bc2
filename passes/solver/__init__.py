"""The placement problem as numbers: its data model, the ILP that solves it, and the checks of its answers."""
from __future__ import annotations

import pulp.apis

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


def _forget_frames() -> None:
    """Drop the tracebacks that PuLP stores with its classes of solvers that are not installed.

    They refer to all frames of PuLP's first import, which happens while a graph is compiled: the first compiled model and
    its optimizer's state would never be freed.
    """
    for solver in vars(pulp.apis).values():
        error = vars(solver).get("err") if isinstance(solver, type) else None
        while isinstance(error, BaseException):
            error.__traceback__ = None
            error = error.__context__


_forget_frames()
