"""Report of a memory trace: saved and recomputed values by name, and the bytes by part at each op."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from passes.json_records import FrozenMap
from passes.simulation.memory.memory_trace import MemoryTrace
from passes.simulation.memory.phase_timeline import PhaseTimeline


@dataclass(frozen=True)
class MemoryMoment:
    """Bytes in memory while one op runs. name: of the op, block: its path; again: True for a forward op recomputed in
    backward. parts: bytes of gradients, of saved values, of recomputed values, of gathered inputs, and of the rest, which is
    transient."""

    name: str = ""
    block: str = ""
    again: bool = False
    parts: FrozenMap[str, int] = FrozenMap({})

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


def fullest(moments: Sequence[MemoryMoment]) -> MemoryMoment:
    """The first moment with the most bytes."""
    return max(moments, key=lambda moment: moment.nbytes, default=MemoryMoment())


@dataclass(frozen=True)
class MemoryReport:
    """forward_moments, backward_moments: the timeline of each phase, wherever its bytes change. saved: (name, block, bytes) of
    saved values, the largest first; offloaded: with the us of moving each, of values kept out of the device's memory. again:
    (name, block, us) of recomputed calls. All of these are per layer; layers: number of layers, by name, where that is more
    than one. gradient_bytes: of backward's outputs."""

    forward_moments: tuple[MemoryMoment, ...] = ()
    backward_moments: tuple[MemoryMoment, ...] = ()
    saved: tuple[tuple[str, str, int], ...] = ()
    offloaded: tuple[tuple[str, str, int, float], ...] = ()
    again: tuple[tuple[str, str, float], ...] = ()
    gradient_bytes: int = 0
    layers: FrozenMap[str, int] = FrozenMap({})

    @property
    def forward(self) -> MemoryMoment:
        """The peak of forward."""
        return fullest(self.forward_moments)

    @property
    def backward(self) -> MemoryMoment:
        """The peak of backward."""
        return fullest(self.backward_moments)


def report_memory(walk: MemoryTrace) -> MemoryReport:
    program = walk.program
    kept = sorted(walk.saved, key=lambda s: -program.storages[s].nbytes)
    return MemoryReport(
        phase_moments(walk, walk.forward), phase_moments(walk, walk.backward),
        tuple((program.storages[s].name, program.runs[program.maker(s)].block, program.storages[s].nbytes)
              for s in kept if s not in walk.offloaded),
        tuple((program.storages[s].name, program.runs[program.maker(s)].block, program.storages[s].nbytes,
               program.storages[s].offload_us)
              for s in kept if s in walk.offloaded),
        tuple((program.runs[k].name, program.runs[k].block, program.runs[k].us) for k in walk.recomputed),
        program.bytes_of(program.gradients),
        FrozenMap({**{program.storages[s].name: program.copies[s] for s in kept if program.copies[s] > 1},
                   **{program.runs[k].name: program.layers_again[k] for k in walk.recomputed if program.layers_again[k] > 1}}))


def phase_moments(walk: MemoryTrace, phase: PhaseTimeline) -> tuple[MemoryMoment, ...]:
    """The moments of a phase in order, each op whose bytes by part differ from those of the op before it."""
    found: list[MemoryMoment] = []
    for number, parts in zip(phase.order, _parts(walk, phase), strict=True):
        if not found or found[-1].parts != parts:
            run = walk.program.runs[number if number >= 0 else -1 - number]
            found.append(MemoryMoment(run.name, run.block, number < 0, FrozenMap(parts)))
    return tuple(found)


def _parts(walk: MemoryTrace, phase: PhaseTimeline) -> list[dict[str, int]]:
    """Bytes by part at each position of a phase; their sums are `phase.nbytes`."""
    count, backward = len(phase.order), phase is walk.backward
    change: dict[str, list[int]] = defaultdict(lambda: [0] * (count + 2))
    for life in phase.lives:
        own, nbytes = change[_part(walk, life.storage, backward)], walk.program.storages[life.storage].nbytes
        own[max(life.first, 0)] += nbytes
        own[life.last + 1] -= nbytes
    held = {part: [*accumulate(own)] for part, own in change.items()}
    found = []
    for position in range(count):
        parts = Counter({part: own[position] for part, own in held.items()})
        before, after = phase.others(position)
        parts["saved"] += before + phase.others_saved
        parts["gradients"] += phase.others_added
        parts["gradients" if backward else "saved"] += after
        parts["transient"] += phase.workspace_bytes[position]
        found.append({part: nbytes for part, nbytes in parts.items() if nbytes})
    return found


def _part(walk: MemoryTrace, storage: int, backward: bool) -> str:
    program = walk.program
    if storage in program.returned and program.storages[storage].gathered:  # for all microbatches
        return "gathered"
    if storage in walk.saved or (backward and storage in program.returned):
        return "saved"
    if backward and storage in program.gradients:
        return "gradients"
    if program.storages[storage].gathered:
        return "gathered"
    return "recomputed" if backward and program.is_forward(storage) else "transient"
