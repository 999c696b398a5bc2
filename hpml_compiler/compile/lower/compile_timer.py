"""Compile times by phase, for the plan, and a progress line on a terminal."""
from __future__ import annotations

import sys
import time
from typing import Any

import torch.distributed as dist

from passes.session_state import state_of


class compile_phase:  # noqa: N801  # reads as a statement
    """Context manager of one compile phase: adds its time, without that of nested phases, to `seconds[what]`, in seconds.
    Meanwhile, rank 0's terminal shows `text`."""

    def __init__(self, what: str, text: str, seconds: dict[str, float]) -> None:
        self.what, self.text, self.seconds, self.detail = what, text, seconds, ""
        self.inside_s = 0.0

    def __enter__(self) -> None:
        state_of(_OpenPhases).append(self)
        _show()
        self.start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        took = time.perf_counter() - self.start
        phases = state_of(_OpenPhases)
        phases.remove(self)
        self.seconds[self.what] = self.seconds.get(self.what, 0.0) + took - self.inside_s
        if phases:
            phases[-1].inside_s += took
        _show()


class _OpenPhases(list[compile_phase]):
    """Phases that this process is in, the innermost last."""


def part(what: str, text: str) -> compile_phase:
    """A phase nested in another one: its time counts for the same graph, and its line begins with that graph's name, if any."""
    phases = state_of(_OpenPhases)
    if not phases:
        return compile_phase(what, text, {})
    name, colon, _ = phases[-1].text.rpartition(": ")
    return compile_phase(what, f"{name}{colon}{text}", phases[-1].seconds)


def tell(detail: str) -> None:
    """Show the progress of the innermost phase: "block 3 of 5"."""
    if phases := state_of(_OpenPhases):
        phases[-1].detail = f", {detail}"
        _show()


def _show() -> None:
    """Write or erase the progress line: only on a terminal, so that log files have none of it."""
    if not sys.stderr.isatty() or dist.is_initialized() and dist.get_rank() != 0:
        return
    phases = state_of(_OpenPhases)
    text = f"hpml: {phases[-1].text}{phases[-1].detail} ..." if phases else ""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
