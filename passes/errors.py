"""Errors that the user can fix: each states the problem, the place, and the next step."""
from __future__ import annotations

from typing import Any


class HpmlError(Exception):
    """Base of all errors meant for the user; the command line prints them without a traceback.

    what: the problem, one sentence. where: the input, node, file or rank with the problem.
    next_step: what to do about it. The command line ends with `exit_code`.
    """

    exit_code = 1

    def __init__(self, what: str, where: str = "", next_step: str = "") -> None:
        super().__init__(what, where, next_step)  # all three, so that the error survives pickling between ranks
        self.what = what
        self.where = where
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next_step:
            lines.append(f"  next step: {self.next_step}")
        return "\n".join(lines)


def shortened(text: str, most: int = 80) -> str:
    """User input, shortened for an error message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class BadInput(HpmlError):
    """An option, file, mesh, plan or model that is invalid or unsupported."""

    exit_code = 2


class Infeasible(HpmlError):
    """No plan meets the constraints, such as a byte budget. smallest_budget_bytes: a feasible budget, where known. plan: one
    that exceeds the budget, where that was found out last, to be looked at."""

    exit_code = 3
    smallest_budget_bytes: float | None = None
    plan: Any = None

    def without_frames(self) -> Infeasible:
        """A copy to keep: the error itself holds the frames that it came from, and their graphs."""
        made = Infeasible(self.what, self.where, self.next_step)
        made.smallest_budget_bytes = self.smallest_budget_bytes
        return made


class MissingDependency(HpmlError):
    """A program, package or device that the request needs is missing."""

    exit_code = 4
