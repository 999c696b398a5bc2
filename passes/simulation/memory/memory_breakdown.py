"""Report of a memory trace: saved and recomputed values by name, and the breakdown of the peaks."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from passes.json_records import FrozenMap
from passes.simulation.memory.memory_trace import MemoryTrace
from passes.simulation.memory.phase_timeline import PhaseTimeline


@dataclass(frozen=True)
class TracePeak:
    """Peak of forward or backward. name: of the running op, block: its path; again:
    True for a forward op recomputed in backward. parts: bytes of gradients, of saved values, of recomputed values,
    and of the rest, which is transient."""

    name: str = ""
    block: str = ""
    again: bool = False
    parts: FrozenMap[str, int] = FrozenMap({})


@dataclass(frozen=True)
class MemoryReport:
    """saved: (name, block, bytes) of saved values, the largest first; offloaded: with the us of moving each, of
    values kept out of the device's memory. again: (name, block, us) of recomputed calls. All of these are per layer; layers:
    number of layers, by name, where that is more than one. gradient_bytes: of backward's outputs."""

    forward: TracePeak = TracePeak()
    backward: TracePeak = TracePeak()
    saved: tuple[tuple[str, str, int], ...] = ()
    offloaded: tuple[tuple[str, str, int, float], ...] = ()
    again: tuple[tuple[str, str, float], ...] = ()
    gradient_bytes: int = 0
    layers: FrozenMap[str, int] = FrozenMap({})


def report_memory(walk: MemoryTrace) -> MemoryReport:
    tape = walk.tape
    kept = sorted(walk.kept, key=lambda s: -tape.storages[s].nbytes)
    return MemoryReport(
        _fullest(walk, walk.forward), _fullest(walk, walk.backward),
        tuple((tape.storages[s].name, tape.runs[tape.maker(s)].block, tape.storages[s].nbytes)
              for s in kept if s not in walk.offloaded),
        tuple((tape.storages[s].name, tape.runs[tape.maker(s)].block, tape.storages[s].nbytes, tape.storages[s].offload_us)
              for s in kept if s in walk.offloaded),
        tuple((tape.runs[k].name, tape.runs[k].block, tape.runs[k].us) for k in walk.again),
        tape.bytes_of(tape.gradients),
        FrozenMap({**{tape.storages[s].name: tape.copies[s] for s in kept if tape.copies[s] > 1},
                   **{tape.runs[k].name: tape.layers_again[k] for k in walk.again if tape.layers_again[k] > 1}}))


def _fullest(walk: MemoryTrace, phase: PhaseTimeline) -> TracePeak:
    if not phase.order:
        return TracePeak()
    position = phase.nbytes.index(max(phase.nbytes))
    number = phase.order[position]
    run = walk.tape.runs[number if number >= 0 else -1 - number]
    return TracePeak(run.name, run.block, number < 0, FrozenMap(_parts(walk, phase, position)))


def _parts(walk: MemoryTrace, phase: PhaseTimeline, position: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for storage in phase.alive(position):
        found[_part(walk, storage, phase is walk.backward)] += walk.tape.storages[storage].nbytes
    before, after = phase.others(position)
    found["saved"] += before + phase.others_saved
    found["gradients"] += phase.others_added
    found["gradients" if phase is walk.backward else "saved"] += after
    found["transient"] += phase.workspace_bytes[position]
    return {part: nbytes for part, nbytes in found.items() if nbytes}


def _part(walk: MemoryTrace, storage: int, backward: bool) -> str:
    tape = walk.tape
    if storage in walk.kept or (backward and storage in tape.returned):
        return "saved"
    if backward and storage in tape.gradients:
        return "gradients"
    return "recomputed" if backward and tape.is_forward(storage) else "transient"
