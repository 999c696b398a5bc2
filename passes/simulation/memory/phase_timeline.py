"""Timeline of forward or backward, with the bytes in memory at each op.

A folded layer has its ops in the order once. As its layers run one after another, the values that each leaves for
backward, or for the optimizer, accumulate, and those it had from forward are freed: linearly, so that the peak is in the first
or the last of them. A value that one layer passes to the next exists once, as between any two neighbors.
"""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from passes.simulation.memory.storage_program import FoldedLayer, StorageProgram


class StorageLifetime(NamedTuple):
    """Positions in the order of one phase: `first` writes a storage (-1: it existed before), `last` reads it last (the
    length of the phase: it outlives the phase)."""

    storage: int
    first: int
    last: int


@dataclass(frozen=True)
class FoldedSpan:
    """Span of a folded layer, from position `start` up to `end`. freed, made: bytes that the other layers it stands for
    free there, and leave behind."""

    stand_in: FoldedLayer
    start: int
    end: int
    freed: int = 0
    made: int = 0


@dataclass(frozen=True)
class PhaseTimeline:
    """order: numbers of runs; -1 - number for one of forward that backward runs once more. lives: of what takes memory.
    others_saved, others_added: bytes that other microbatches have saved, and of the gradients that they have made."""

    program: StorageProgram
    order: tuple[int, ...]
    lives: tuple[StorageLifetime, ...]
    others_saved: int = 0
    others_added: int = 0

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes in memory while each op runs; for a folded layer, in the layer with the most."""
        if not self.program.stand_ins:
            return self.alone
        change = [0] * (len(self.order) + 1)
        change[0] = self.others_before
        for stretch in self.stretches:
            change[stretch.start if stretch.made > stretch.freed else stretch.end] += stretch.made - stretch.freed
        return tuple(map(sum, zip(self.alone, accumulate(change))))

    @cached_property
    def most_bytes(self) -> int:
        return max(self.nbytes, default=0)

    def others(self, position: int) -> tuple[int, int]:
        """Bytes of the other layers that folded ones stand for: from before the phase, and written in it."""
        before, after = self.others_before, 0
        for stretch in self.stretches:
            if position >= stretch.end or position >= stretch.start and stretch.made > stretch.freed:
                before -= stretch.freed
                after += stretch.made
        return before, after

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """Held while each run runs, if each layer stood for itself alone."""
        change = [self.others_saved + self.others_added] + [0] * (len(self.order) + 1)
        for life in self.lives:
            size = self.program.storages[life.storage].nbytes
            change[max(life.first, 0)] += size
            change[life.last + 1] -= size
        return tuple(map(sum, zip(accumulate(change), self.workspace_bytes)))

    @cached_property
    def workspace_bytes(self) -> tuple[int, ...]:
        """Workspace bytes at each position: of an op while it runs; of a collective, until its wait, or where it lingers until
        another one has allocated its own: its thread is idle until then."""
        waited = {self.program.runs[number].waits_for for number in self.order if number >= 0}
        open_ones: dict[int, int] = {}
        held, latest = [], 0
        for number in self.order:
            run = self.program.runs[number if number >= 0 else -1 - number]
            held.append(latest + sum(open_ones.values()) + run.workspace_bytes + run.scratch_bytes)
            if run.waits_for is not None:
                if (freed := open_ones.pop(run.waits_for, None)) is not None:
                    latest = freed if self.program.runs[run.waits_for].lingers else 0
            elif run.workspace_bytes and number in waited:
                open_ones[number], latest = run.workspace_bytes, 0
            elif run.workspace_bytes:
                latest = run.workspace_bytes if run.lingers else 0
        return tuple(held)

    def alive(self, position: int) -> list[int]:
        return [life.storage for life in self.lives if life.first <= position <= life.last]

    @cached_property
    def others_before(self) -> int:
        """Bytes that exist before the first op, of layers that folded ones stand for."""
        return sum(self._others_bytes(life) for life in self.lives if life.first < 0)

    @cached_property
    def stretches(self) -> tuple[FoldedSpan, ...]:
        """Spans of the folded layers."""
        found: dict[FoldedLayer, list[FoldedSpan]] = {}
        for stand_in in self.program.stand_ins:
            for first, end in (stand_in.forward, stand_in.backward):
                start, stop = self.position(first), self.position(end)
                if start < stop:
                    found.setdefault(stand_in, []).append(FoldedSpan(stand_in, start, stop))
        for life in self.lives:
            maker = self.program.storages[life.storage].maker
            stand_in = None if maker is None else self.program.stand_in_of[maker]
            if stand_in in found:
                self._add(life, found[stand_in])
        return tuple(stretch for own in found.values() for stretch in own)

    def _add(self, life: StorageLifetime, own: list[FoldedSpan]) -> None:
        """Add to the spans of the producing layer: bytes that outlive them, and the next layer."""
        nbytes, end = self._others_bytes(life), len(self.order)
        made = next((k for k, each in enumerate(own) if each.start <= life.first < each.end), len(own) - 1)
        late = len(own) == 2 and made == 0 and life.last >= own[1].start  # such as operands of forward's last ops
        if life.first >= 0 and (late or life.last == end):
            own[made] = replace(own[made], made=own[made].made + nbytes)
        if life.last < end and (late or life.first < 0):
            own[-1] = replace(own[-1], freed=own[-1].freed + nbytes)

    def _others_bytes(self, life: StorageLifetime) -> int:
        """Bytes of a storage in the other layers that its folded layer stands for."""
        return (self.program.copies[life.storage] - 1) * self.program.storages[life.storage].nbytes

    def position(self, run: int) -> int:
        """Position after the last op before this one: recomputed ops come just before their reader."""
        numbers, positions = self._numbers
        earlier = bisect_left(numbers, run)
        return positions[earlier - 1] + 1 if earlier else 0

    @cached_property
    def _numbers(self) -> tuple[list[int], list[int]]:
        """Ops that are not recomputed, in order, and their positions."""
        own = [(number, position) for position, number in enumerate(self.order) if number >= 0]
        return [number for number, _ in own], [position for _, position in own]
