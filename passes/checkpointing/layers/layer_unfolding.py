"""Unfold a storage program with folded layers into all layers, to check the folded trace.

It grows with the depth of the model, and so does a trace of it. So both are compared with few layers
(`counts_alike`): bytes grow linearly with each further one.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from passes.checkpointing.layers.layer_boundary import LayerBoundary, layer_boundaries
from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from passes.simulation.memory.phase_timeline import PhaseTimeline
from passes.simulation.memory.storage_program import FoldedLayer, ProgramOp, StorageProgram

FEW = 3
"""Layers per folded layer when both programs are compared."""
CLOSE = 0.02


@dataclass(frozen=True)
class UnfoldedProgram:
    """source, run_source: for each storage and op of `program`, its index in the folded program."""

    program: StorageProgram
    source: tuple[int, ...]
    run_source: tuple[int, ...]

    def walk(self, walked: MemoryTrace) -> MemoryTrace:
        """Trace with the decision of a folded trace."""
        kept, away = (frozenset(s for s, source in enumerate(self.source) if source in which)
                      for which in (walked.saved, walked.offloaded))
        return simulate_memory(self.program, kept, away)

    def most(self, phase: PhaseTimeline) -> dict[int, int]:
        """Maximum bytes over the layers of each op, by the op's number in the folded program's phase."""
        found: dict[int, int] = {}
        for number, nbytes in zip(phase.order, phase.nbytes, strict=True):
            source = self.run_source[number] if number >= 0 else -1 - self.run_source[-1 - number]
            found[source] = max(nbytes, found.get(source, 0))
        return found


def unfold_layers(program: StorageProgram) -> UnfoldedProgram:
    """Unfold. Raises LayersDiffer."""
    return _Unfolding(program).unfolded()


def counts_alike(walked: MemoryTrace) -> bool:
    """True if the folded trace nowhere counts less than the unfolded one, and its peak is not much higher. A call that only the
    latter runs again, as at the end of a list, is compared with the peak. A call may count less where what it lacks would stay
    below the peak even if each layer lacked it."""
    program = walked.program
    few = replace(program, stand_ins=tuple(replace(each, layers=min(each.layers, FEW)) for each in program.stand_ins))
    unfolded = unfold_layers(few)
    folded, whole = simulate_memory(few, walked.saved, walked.offloaded), unfolded.walk(walked)
    layers = sum(each.layers for each in program.stand_ins)
    for ours, theirs, full in ((folded.forward, whole.forward, walked.forward),
                               (folded.backward, whole.backward, walked.backward)):
        counted, most = dict(zip(ours.order, ours.nbytes, strict=True)), unfolded.most(theirs)
        highest, room = max(counted.values(), default=0), dict(zip(full.order, full.nbytes, strict=True))
        for number, nbytes in most.items():
            lacks = nbytes - counted.get(number, highest)
            if lacks > 0 and room.get(number, walked.peak) + layers * lacks > walked.peak:
                return False
    return folded.peak <= (1 + CLOSE) * whole.peak and abs(whole.us - folded.us) <= CLOSE * (1 + whole.us)


class _Unfolding:
    """numbers: by storage of the folded program and index of its layer, from 1."""

    def __init__(self, program: StorageProgram):
        self.program, self.seams = program, layer_boundaries(program)
        self.runs: list[ProgramOp] = []
        self.source: list[int] = []
        self.run_source: list[int] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.makers: list[int | None] = []
        self.sections: dict[int, tuple[LayerBoundary, FoldedLayer, tuple[int, int]]] = {
            section[0]: (each, stand_in, section) for each in self.seams for stand_in in (each.one, each.other)
            for section in (stand_in.forward, stand_in.backward) if section[0] < section[1]}
        self.back = [{t: s for s, t in each.twins.items()} for each in self.seams]

    def unfolded(self) -> UnfoldedProgram:
        program = self.program
        for s, storage in enumerate(program.storages):
            if storage.maker is None:
                self._storage(s, 1, None)
        at = 0
        while at < len(program.runs):
            if at in self.sections:
                seam, stand_in, section = self.sections[at]
                layers = range(1, stand_in.layers + 1)
                for layer in layers if section == stand_in.forward else reversed(layers):
                    for k in range(*section):
                        self._run(k, seam, stand_in, layer)
                at = section[1]
            else:
                self._run(at, None, None, 1)
                at += 1
        storages = tuple(replace(program.storages[s], maker=maker) for s, maker in zip(self.source, self.makers, strict=True))
        returned, gradients = (frozenset(s for s, source in enumerate(self.source) if source in which)
                               for which in (program.returned, program.gradients))
        return UnfoldedProgram(StorageProgram(tuple(self.runs), storages, returned, gradients, program.between_bytes,
                                              program.after_bytes, microbatches=program.microbatches),
                               tuple(self.source), tuple(self.run_source))

    def _storage(self, s: int, layer: int, maker: int | None) -> int:
        self.numbers[s, layer] = len(self.source)
        self.source.append(s)
        self.makers.append(maker)
        return self.numbers[s, layer]

    def _run(self, k: int, seam: LayerBoundary | None, stand_in: FoldedLayer | None, layer: int) -> None:
        run = self.program.runs[k]
        reads = tuple(self.numbers[self._read(s, seam, stand_in, layer)] for s in run.reads)
        makes = tuple(self._storage(s, layer, len(self.runs)) for s in run.makes)
        waits_for = None if run.waits_for is None else self.makers[reads[0]]
        self.run_source.append(k)
        self.runs.append(replace(run, reads=reads, makes=makes, waits_for=waits_for))

    def _read(self, s: int, seam: LayerBoundary | None, stand_in: FoldedLayer | None, layer: int) -> tuple[int, int]:
        """The layer of the storage that an op of this layer reads in place of `s`."""
        if seam is None or stand_in is None:
            return self._read_outside(s)
        back: Mapping[int, int] = self.back[self.seams.index(seam)]
        if s in (seam.twins if stand_in == seam.one else back):
            return s, layer
        if stand_in == seam.one:
            if s in back:  # from the next layer
                return (s, 1) if layer == stand_in.layers else (back[s], layer + 1)
            before = next((t for t, entered in seam.entering.items() if entered == s), None)
            return self._read_outside(s) if layer == 1 or before is None else (before, layer - 1)
        if s in seam.twins:  # from the previous layer
            return (s, seam.one.layers) if layer == 1 else (seam.twins[s], layer - 1)
        after = next((t for t, left in seam.leaving.items() if left == s), None)
        return self._read_outside(s) if layer == stand_in.layers or after is None else (after, layer + 1)

    def _read_outside(self, s: int) -> tuple[int, int]:
        """Operand of an unfolded layer: of layers before it the last one's, of layers after it the first one's."""
        for each, back in zip(self.seams, self.back, strict=True):
            if s in back:
                return s, each.other.layers
            if s in each.twins:
                return s, 1
        return s, 1
