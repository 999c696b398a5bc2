"""Parts of a storage program while it is built of a step graph."""
from __future__ import annotations

from dataclasses import dataclass, field

from passes.simulation.step_graph import StepCall


@dataclass
class ProgramStep:
    """An op whose number is not known yet."""

    name: str
    block: str
    backward: bool
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    call: StepCall | None = None
    repeatable: bool = True
    workspace_bytes: int = 0
    scratch_bytes: int = 0
    waits_for: ProgramStep | None = None


@dataclass
class ReducedGradients:
    """Gradients that are reduced together: their storages, bytes that are sent, storages of the results, and the op that makes
    the last gradient."""

    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    nbytes: float = 0.0
    last: ProgramStep | None = None
