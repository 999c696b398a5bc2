"""How two neighboring layers on a tape follow on each other: what each hands to the next, and that they do the same.

Runs and storages of two such layers correspond by their places. What the second reads of the first in a place, each further
layer would read of the one before it; what the first reads of the second in a place, as in backward, of the one after it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.simulation.memory.storage_program import FoldedLayer, ProgramOp, Storage, StorageProgram


class LayersDiffer(Exception):
    """Layers do not correspond, or hand on what the layers between them cannot."""


@dataclass(frozen=True)
class LayerBoundary:
    """twins: storage that the first layer makes -> the one that the second makes in its place. entering: storage of the first
    that the second reads -> what the first reads in that place, of the layer before. leaving: storage of the second that the
    first reads -> what the second reads in that place, of the layer after."""

    one: FoldedLayer
    other: FoldedLayer
    twins: Mapping[int, int]
    entering: Mapping[int, int]
    leaving: Mapping[int, int]

    @property
    def crossing(self) -> frozenset[int]:
        """What one layer makes and another one reads."""
        handed_on = {*self.entering, *(self.twins[s] for s in self.entering), *self.entering.values()}
        back = {s for s, twin in self.twins.items() if twin in self.leaving}
        return frozenset(handed_on | back | {*self.leaving, *self.leaving.values()})


def boundary_between(tape: StorageProgram, one: FoldedLayer, other: FoldedLayer) -> LayerBoundary:
    """Of two neighbors, in the order of forward. Raises LayersDiffer."""
    return _LayerPairing(tape, one, other).seam()


def layer_boundaries(tape: StorageProgram) -> tuple[LayerBoundary, ...]:
    """Of all layers that stand for several."""
    return tuple(boundary_between(tape, one, other) for one,
                 other in zip(tape.stand_ins[::2], tape.stand_ins[1::2], strict=True))


def _hold(condition: object) -> None:
    if not condition:
        raise LayersDiffer


class _LayerPairing:
    def __init__(self, tape: StorageProgram, one: FoldedLayer, other: FoldedLayer):
        self.tape, self.one, self.other = tape, one, other
        _hold(len(one.runs) == len(other.runs))
        self.home = {s: layer for layer in (one, other) for k in layer.runs for s in tape.runs[k].makes}
        self.twins: dict[int, int] = {}
        self.entering: dict[int, int] = {}
        self.leaving: dict[int, int] = {}
        self.shared: set[int] = set()

    def seam(self) -> LayerBoundary:
        pairs = [(self.tape.runs[k], self.tape.runs[m]) for k, m in zip(self.one.runs, self.other.runs, strict=True)]
        for run, twin in pairs:
            _hold(_does(run) == _does(twin))
            for s, t in zip(run.makes, twin.makes, strict=True):
                self.twins[s] = t
                _hold(_is(self.tape, s) == _is(self.tape, t))
        for run, twin in pairs:
            for s, t in zip(run.reads, twin.reads, strict=True):
                self._pair_reads(s, t)
        for neighbors in self.entering, self.leaving:  # each is one thing, and nothing else
            _hold(len(set(neighbors.values())) == len(neighbors) and self.shared.isdisjoint(neighbors.values()))
        self._check_readers()
        return LayerBoundary(self.one, self.other, self.twins, self.entering, self.leaving)

    def _pair_reads(self, s: int, t: int) -> None:
        """What a run of the first reads, and what its twin reads in that place."""
        homes = self.home.get(s), self.home.get(t)
        if homes == (self.one, self.other):
            _hold(self.twins[s] == t)
        elif homes == (None, self.one):
            _hold(self.entering.setdefault(t, s) == s and _alike(self.tape, s, t))
        elif homes == (self.other, None):
            _hold(self.leaving.setdefault(s, t) == t and _alike(self.tape, s, t))
        else:  # the same for all layers, or of a layer its own, such as parameters, which are there all the time
            given = {self.tape.storages[each].given for each in (s, t)}
            _hold(homes == (None, None) and (s == t or given == {"forward"}))
            self.shared.update({s, t} if s == t else ())

    def _check_readers(self) -> None:
        """Nobody but its neighbor reads what a layer makes: nobody can read it of all the layers that one stands for."""
        own = {*self.one.runs, *self.other.runs}
        for s, t in self.twins.items():
            _hold(t in self.leaving or own.issuperset(self.tape.readers[s]))
            _hold(s in self.entering or own.issuperset(self.tape.readers[t]))


def _does(run: ProgramOp) -> tuple[object, ...]:
    return (run.backward, run.us, run.repeatable, run.inlined, run.fusing, run.workspace_bytes, run.scratch_bytes,
            run.waits_for is None, len(run.reads), len(run.makes))


def _is(tape: StorageProgram, s: int) -> tuple[object, ...]:
    return *_holds(tape.storages[s]), s in tape.returned, s in tape.gradients


def _alike(tape: StorageProgram, s: int, t: int) -> bool:
    return _holds(tape.storages[s]) == _holds(tape.storages[t])


def _holds(storage: Storage) -> tuple[object, ...]:
    return storage.nbytes, storage.save_us, storage.offload_us, storage.said
