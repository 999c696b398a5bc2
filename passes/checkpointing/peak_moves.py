"""Changes of the saved set that may lower a trace's peak: others need no trace.

The bytes at a moment are those of live storages. To stop saving a storage helps if it is live at that moment; in forward
also if it is computed for backward alone, and its operands are live. To save one more helps if something is
live only because it is computed from it: recomputed in backward or, if it is inlined, by its readers.
"""
from __future__ import annotations

from passes.simulation.memory.memory_trace import MemoryTrace, forward_order


def can_lower_peak(walk: MemoryTrace) -> frozenset[int]:
    """Storages whose saving, dropping or offloading may lower the peak."""
    for phase, look in (walk.forward, _in_forward), (walk.backward, _in_backward):
        if phase.order and max(phase.nbytes) == walk.peak:
            found = look(walk, phase.nbytes.index(walk.peak)) | _of_other_layers(walk)
            return found if walk.program.microbatches.in_flight == 1 else found | walk.saved
    return walk.saved if walk.between == walk.peak else frozenset()


def _in_forward(walk: MemoryTrace, position: int) -> frozenset[int]:
    program, alive = walk.program, frozenset(walk.forward.alive(position))
    needed = set(forward_order(program, ()))
    in_memory = {life.storage for life in walk.forward.lives}
    found: set[int] = set()
    for number in walk.forward.order:
        from_there = not found.isdisjoint(program.runs[number].reads) or not alive.isdisjoint(program.runs[number].reads)
        for s in program.runs[number].makes:
            if from_there and (s not in in_memory or number not in needed):
                found.add(s)
    return frozenset(found | alive)


def _in_backward(walk: MemoryTrace, position: int) -> frozenset[int]:
    program, order, alive = walk.program, walk.backward.order, frozenset(walk.backward.alive(position))
    stays = {s for number in order[position + 1:] if number >= 0 for s in program.runs[number].reads} & walk.saved
    sources, found = alive - stays, set[int]()
    for number in sorted(walk.recomputed):
        if not found.isdisjoint(program.runs[number].reads) or not sources.isdisjoint(program.runs[number].reads):
            found.update(s for s in program.runs[number].makes if s not in walk.saved)
    return frozenset(found | alive)


def _of_other_layers(walk: MemoryTrace) -> frozenset[int]:
    """Saved storages in folded layers: live at most moments."""
    return frozenset(s for s in walk.saved if walk.program.copies[s] > 1)
