"""PuLP, imported so that it keeps nobody's stack frames.

Its classes of solvers that are not installed store the error of their import. The traceback of such an error refers to all
frames that were active, and PuLP is first imported while a graph is compiled: the first compiled model and its optimizer's
state would never be freed. `from passes.solver.pulp_module import pulp`.
"""
from __future__ import annotations

import pulp as pulp  # noqa: PLC0414  # for other modules
import pulp.apis


def _forget_frames() -> None:
    for solver in vars(pulp.apis).values():
        error = vars(solver).get("err") if isinstance(solver, type) else None
        while isinstance(error, BaseException):
            error.__traceback__ = None
            error = error.__context__


_forget_frames()
