"""Forward or backward, with what is held at each run.

Of a layer that stands for several, the order has the runs once. As its layers run one after another, what each hands on to
backward, or to the optimizer, adds up, and what it had from forward goes: linearly, so that the first or the last of them is
where most is held. What one layer hands to the next is there once, as between any two neighbors.
"""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from passes.simulation.memory.storage_program import FoldedLayer, StorageProgram


class StorageLifetime(NamedTuple):
    """Positions in the order of one phase: `first` makes a storage (-1: it was there before), `last` reads it last (the
    length of the phase: it is handed on)."""

    storage: int
    first: int
    last: int


@dataclass(frozen=True)
class FoldedSpan:
    """Where a layer runs that stands for several, from position `start` up to `end`. freed, made: bytes that the others of
    these layers are rid of there, and that they leave."""

    stand_in: FoldedLayer
    start: int
    end: int
    freed: int = 0
    made: int = 0


@dataclass(frozen=True)
class PhaseTimeline:
    """order: numbers of runs; -1 - number for one of forward that backward runs once more. lives: of what takes memory."""

    tape: StorageProgram
    order: tuple[int, ...]
    lives: tuple[StorageLifetime, ...]

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Held while each run runs; of one that stands for several layers, in that of them where most is."""
        if not self.tape.stand_ins:
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
        """Bytes that the layers hold which others stand for: those from before the phase, and those that it made."""
        before, after = self.others_before, 0
        for stretch in self.stretches:
            if position >= stretch.end or position >= stretch.start and stretch.made > stretch.freed:
                before -= stretch.freed
                after += stretch.made
        return before, after

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """Held while each run runs, if each layer stood for itself alone."""
        change = [0] * (len(self.order) + 2)
        for life in self.lives:
            size = self.tape.storages[life.storage].nbytes
            change[max(life.first, 0)] += size
            change[life.last + 1] -= size
        return tuple(map(sum, zip(accumulate(change), self.workspace_bytes)))

    @cached_property
    def workspace_bytes(self) -> tuple[int, ...]:
        """At each position: what a run takes besides while it runs; of a collective, until it is waited for. The latest
        collective's goes when another one has taken its own: the thread that did it has nothing else to do."""
        waited = {self.tape.runs[number].waits_for for number in self.order if number >= 0}
        open_ones: dict[int, int] = {}
        held, latest = [], 0
        for number in self.order:
            run = self.tape.runs[number if number >= 0 else -1 - number]
            held.append(latest + sum(open_ones.values()) + run.workspace_bytes + run.scratch_bytes)
            if run.waits_for is not None:
                latest = open_ones.pop(run.waits_for, latest)
            elif run.workspace_bytes and number in waited:
                open_ones[number], latest = run.workspace_bytes, 0
            elif run.workspace_bytes:
                latest = run.workspace_bytes
        return tuple(held)

    def alive(self, position: int) -> list[int]:
        return [life.storage for life in self.lives if life.first <= position <= life.last]

    @cached_property
    def others_before(self) -> int:
        """Bytes that are there before the first run, of layers that others stand for."""
        return sum(self._others_bytes(life) for life in self.lives if life.first < 0)

    @cached_property
    def stretches(self) -> tuple[FoldedSpan, ...]:
        """Of the layers that stand for several."""
        found: dict[FoldedLayer, list[FoldedSpan]] = {}
        for stand_in in self.tape.stand_ins:
            for first, end in (stand_in.forward, stand_in.backward):
                start, stop = self.position(first), self.position(end)
                if start < stop:
                    found.setdefault(stand_in, []).append(FoldedSpan(stand_in, start, stop))
        for life in self.lives:
            maker = self.tape.storages[life.storage].maker
            stand_in = None if maker is None else self.tape.stand_in_of[maker]
            if stand_in in found:
                self._add(life, found[stand_in])
        return tuple(stretch for own in found.values() for stretch in own)

    def _add(self, life: StorageLifetime, own: list[FoldedSpan]) -> None:
        """To the stretches of the layer that makes it: what stays beyond them, and beyond the layer that comes next."""
        nbytes, end = self._others_bytes(life), len(self.order)
        made = next((k for k, each in enumerate(own) if each.start <= life.first < each.end), len(own) - 1)
        late = len(own) == 2 and made == 0 and life.last >= own[1].start  # as what forward makes at its end needs
        if life.first >= 0 and (late or life.last == end):
            own[made] = replace(own[made], made=own[made].made + nbytes)
        if life.last < end and (late or life.first < 0):
            own[-1] = replace(own[-1], freed=own[-1].freed + nbytes)

    def _others_bytes(self, life: StorageLifetime) -> int:
        """Of a storage, in the layers that the one which makes it stands for besides."""
        return (self.tape.copies[life.storage] - 1) * self.tape.storages[life.storage].nbytes

    def position(self, run: int) -> int:
        """After the last run that comes before this one: what is made again for a run comes just before it."""
        numbers, positions = self._numbers
        earlier = bisect_left(numbers, run)
        return positions[earlier - 1] + 1 if earlier else 0

    @cached_property
    def _numbers(self) -> tuple[list[int], list[int]]:
        """Runs that are no repetitions, in order, and their positions."""
        own = [(number, position) for position, number in enumerate(self.order) if number >= 0]
        return [number for number, _ in own], [position for _, position in own]
