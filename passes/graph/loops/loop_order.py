"""The order in which the parts of a microbatch loop run, and which values are still read after each of them."""
from __future__ import annotations

from dataclasses import dataclass

from passes.graph.loops.loop_parts import GraphFragment, PrologueEpilogue

FORWARD, BACKWARD = "forward", "backward"
BEFORE, AFTER = ("before forward", "before backward"), ("after forward", "after backward")


@dataclass(frozen=True)
class LoopStep:
    """A segment around the loop, or one half of all microbatches. reads, makes: names of values."""

    name: str
    reads: frozenset[str]
    makes: tuple[str, ...]


def loop_parts(loop: PrologueEpilogue, at_once: bool) -> tuple[LoopStep, ...]:
    """Parts in execution order. at_once: backward of each microbatch follows its forward, all within the graph's forward;
    otherwise all forwards run first, and backward runs when gradients arrive."""

    def segment(names: tuple[str, str], which: tuple[GraphFragment, GraphFragment], half: int) -> LoopStep:
        return LoopStep(names[half], frozenset(which[half].reads), which[half].makes)

    before, after = ([segment(names, which, half) for half in (0, 1)]
                     for names, which in ((BEFORE, loop.before), (AFTER, loop.after)))
    reads = frozenset(each.name for each in loop.reads)
    ahead = LoopStep(FORWARD, reads, tuple(each.name for each in loop.forward))
    back = LoopStep(BACKWARD, reads | {each.name for each in loop.late}, tuple(each.name for each in loop.backward))
    return (*before, ahead, back, *after) if at_once else (before[0], ahead, after[0], before[1], back, after[1])


def read_later(loop: PrologueEpilogue, at_once: bool) -> dict[str, frozenset[str]]:
    """Names of the values that are read or returned after each part, by the name of the part."""
    found: dict[str, frozenset[str]] = {}
    later = frozenset(name for name in loop.results if name is not None)
    for part in reversed(loop_parts(loop, at_once)):
        found[part.name] = later
        later |= part.reads
    return found
