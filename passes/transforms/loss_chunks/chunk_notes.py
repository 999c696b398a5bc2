"""Notes of how losses are computed, made where a graph is rewritten and read by what decides and records a step."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from passes.graph.decision import LossChunking
from passes.session_state import state_of


class ChunkNotes:
    """taken: those of the innermost `noting_chunks`; None outside of one."""

    def __init__(self) -> None:
        self.taken: list[LossChunking] | None = None


@contextmanager
def noting_chunks() -> Iterator[list[LossChunking]]:
    """Context that collects the notes made in it. Trials make some, too: the last is that of the graph that runs."""
    notes, own = state_of(ChunkNotes), list[LossChunking]()
    before, notes.taken = notes.taken, own
    try:
        yield own
    finally:
        notes.taken = before


def note(found: LossChunking) -> bool:
    """Make a note. Returns False if the same was noted before, as by a trial."""
    taken = state_of(ChunkNotes).taken
    if taken is None:
        return True
    taken.append(found)
    return found not in taken[:-1]
