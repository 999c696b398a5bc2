"""Boundary between two equal neighboring layers of a storage program: the storages that each passes to the next.

Ops and storages of two such layers correspond by position. A storage of the first that the second reads at a position is read
likewise in each further layer from the layer before it; one of the second that the first reads, as in backward, from the
layer after it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.simulation.memory.storage_program import FoldedLayer, ProgramOp, Storage, StorageProgram


class LayersDiffer(Exception):
    """Layers do not correspond, or pass on values that folded layers cannot."""


@dataclass(frozen=True)
class LayerBoundary:
    """twins: storage of the first layer -> the corresponding one of the second. entering: storage of the first
    that the second reads -> the first's operand at that position, from the previous layer. leaving: storage of the second that
    the first reads -> the second's operand at that position, from the next layer."""

    one: FoldedLayer
    other: FoldedLayer
    twins: Mapping[int, int]
    entering: Mapping[int, int]
    leaving: Mapping[int, int]

    @property
    def crossing(self) -> frozenset[int]:
        """Storages of one layer that another one reads."""
        handed_on = {*self.entering, *(self.twins[s] for s in self.entering), *self.entering.values()}
        back = {s for s, twin in self.twins.items() if twin in self.leaving}
        return frozenset(handed_on | back | {*self.leaving, *self.leaving.values()})


def boundary_between(program: StorageProgram, one: FoldedLayer, other: FoldedLayer) -> LayerBoundary:
    """Boundary of two neighbors, in the order of forward. Raises LayersDiffer."""
    return _LayerPairing(program, one, other).seam()


def layer_boundaries(program: StorageProgram) -> tuple[LayerBoundary, ...]:
    """Boundaries of all folded layers."""
    return tuple(boundary_between(program, one, other) for one,
                 other in zip(program.stand_ins[::2], program.stand_ins[1::2], strict=True))


def _hold(condition: object, what: str) -> None:
    if not condition:
        raise LayersDiffer(what)


class _LayerPairing:
    def __init__(self, program: StorageProgram, one: FoldedLayer, other: FoldedLayer):
        self.program, self.one, self.other = program, one, other
        _hold(len(one.runs) == len(other.runs), "neighboring layers have different operations")
        self.home = {s: layer for layer in (one, other) for k in layer.runs for s in program.runs[k].makes}
        self.twins: dict[int, int] = {}
        self.entering: dict[int, int] = {}
        self.leaving: dict[int, int] = {}
        self.shared: set[int] = set()

    def seam(self) -> LayerBoundary:
        pairs = [(self.program.runs[k], self.program.runs[m]) for k, m in zip(self.one.runs, self.other.runs, strict=True)]
        for run, twin in pairs:
            _hold(_does(run) == _does(twin), f"{run.name} and {twin.name} of neighboring layers differ")
            for s, t in zip(run.makes, twin.makes, strict=True):
                self.twins[s] = t
                _hold(_is(self.program, s) == _is(self.program, t), f"results of {run.name} and {twin.name} differ")
        for run, twin in pairs:
            for s, t in zip(run.reads, twin.reads, strict=True):
                self._pair_reads(s, t)
        for neighbors in self.entering, self.leaving:  # each maps to exactly one storage
            _hold(len(set(neighbors.values())) == len(neighbors) and self.shared.isdisjoint(neighbors.values()),
                  "layers pass one value on as several")
        self._check_readers()
        return LayerBoundary(self.one, self.other, self.twins, self.entering, self.leaving)

    def _pair_reads(self, s: int, t: int) -> None:
        """Match an operand of the first layer with the twin's operand at that position."""
        homes = self.home.get(s), self.home.get(t)
        what = f"neighboring layers read {self.program.storages[s].name} and {self.program.storages[t].name}"
        if homes == (self.one, self.other):
            _hold(self.twins[s] == t, what)
        elif homes == (None, self.one):
            _hold(self.entering.setdefault(t, s) == s and _alike(self.program, s, t), what)
        elif homes == (self.other, None):
            _hold(self.leaving.setdefault(s, t) == t and _alike(self.program, s, t), what)
        else:  # the same for all layers, or each layer's own, such as parameters, which are always in memory
            given = {self.program.storages[each].input_phase for each in (s, t)}
            _hold(homes == (None, None) and (s == t or given == {"forward"}), what)
            self.shared.update({s, t} if s == t else ())

    def _check_readers(self) -> None:
        """Only its neighbors read a layer's storages: no other reader could name one of the folded layers."""
        own = {*self.one.runs, *self.other.runs}
        for s, t in self.twins.items():
            what = f"{self.program.storages[s].name} of a layer is read by others than its neighbors"
            _hold(t in self.leaving or own.issuperset(self.program.readers[s]), what)
            _hold(s in self.entering or own.issuperset(self.program.readers[t]), what)


def _does(run: ProgramOp) -> tuple[object, ...]:
    return (run.backward, run.us, run.repeatable, run.inlined, run.fusing, run.workspace_bytes, run.scratch_bytes,
            run.waits_for is None, len(run.reads), len(run.makes))


def _is(program: StorageProgram, s: int) -> tuple[object, ...]:
    return *_holds(program.storages[s]), s in program.returned, s in program.gradients


def _alike(program: StorageProgram, s: int, t: int) -> bool:
    return _holds(program.storages[s]) == _holds(program.storages[t])


def _holds(storage: Storage) -> tuple[object, ...]:
    return storage.nbytes, storage.save_us, storage.offload_us, storage.pinned
