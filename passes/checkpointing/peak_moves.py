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
            return found if walk.tape.microbatches.in_flight == 1 else found | walk.kept
    return walk.kept if walk.between == walk.peak else frozenset()


def _in_forward(walk: MemoryTrace, position: int) -> frozenset[int]:
    tape, alive = walk.tape, frozenset(walk.forward.alive(position))
    needed = set(forward_order(tape, ()))
    in_memory = {life.storage for life in walk.forward.lives}
    found: set[int] = set()
    for number in walk.forward.order:
        from_there = not found.isdisjoint(tape.runs[number].reads) or not alive.isdisjoint(tape.runs[number].reads)
        for s in tape.runs[number].makes:
            if from_there and (s not in in_memory or number not in needed):
                found.add(s)
    return frozenset(found | alive)


def _in_backward(walk: MemoryTrace, position: int) -> frozenset[int]:
    tape, order, alive = walk.tape, walk.backward.order, frozenset(walk.backward.alive(position))
    stays = {s for number in order[position + 1:] if number >= 0 for s in tape.runs[number].reads} & walk.kept
    sources, found = alive - stays, set[int]()
    for number in sorted(walk.again):
        if not found.isdisjoint(tape.runs[number].reads) or not sources.isdisjoint(tape.runs[number].reads):
            found.update(s for s in tape.runs[number].makes if s not in walk.kept)
    return frozenset(found | alive)


def _of_other_layers(walk: MemoryTrace) -> frozenset[int]:
    """Saved storages in folded layers: live at most moments."""
    return frozenset(s for s in walk.kept if walk.tape.copies[s] > 1)
