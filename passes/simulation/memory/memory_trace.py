"""A walk along a tape, forward and then backward, that counts the bytes which are held at every run.

Given what is kept, forward runs what its outputs and the kept storages need. Backward makes the rest again, each just before
the first run that reads it, as rematerialization does (`passes.transforms.memory.rematerialization`). A storage lives from the
run that makes it to the last one that reads it; what is kept, from forward to its last reader in backward. What is offloaded is
kept elsewhere in between: in forward it lives like what is not kept, in backward from its first reader on. A result that is
computed inside the kernels of its readers takes nothing, but what it is computed from lives as long as these. What is costly to
compute is no such result where several read it that are in different kernels.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from passes.simulation.memory.phase_timeline import PhaseTimeline, StorageLifetime
from passes.simulation.memory.storage_program import ProgramOp, StorageProgram

MOST_READS, MOST_READS_IF_SHARED = 8, 4
"""Inductor puts a result into memory that is computed from more storages than that, or that several read who would read so
many each (`realize_acc_reads_threshold`, `realize_reads_threshold` of its configuration)."""


@dataclass(frozen=True)
class MemoryTrace:
    """kept: storages that forward makes and backward may find; with those of which it makes others again and that cannot be
    made again themselves. backward_order: numbers of runs, as of a `PhaseTimeline`. offloaded: those of what is kept that are
    elsewhere in between."""

    tape: StorageProgram
    kept: frozenset[int]
    backward_order: tuple[int, ...] = field(repr=False)
    offloaded: frozenset[int] = frozenset()

    @cached_property
    def forward(self) -> PhaseTimeline:
        return _phase(self.tape, forward_order(self.tape, self.kept), frozenset(), self._handed_on, self.offloaded)

    @cached_property
    def backward(self) -> PhaseTimeline:
        held = self.tape.returned | self.tape.gradients
        return _phase(self.tape, self.backward_order, self._handed_on, held, self.offloaded)

    @property
    def _handed_on(self) -> frozenset[int]:
        """What forward returns stays with its caller, which may hold it until backward is over."""
        return self.kept - self.offloaded | self.tape.returned

    @cached_property
    def peak(self) -> int:
        """The most bytes held at once, without what a graph is given for forward."""
        return max(self.forward.most_bytes, self.backward.most_bytes, self.between, self.after)

    @cached_property
    def between(self) -> int:
        """Bytes held when forward is over, by others too."""
        return self.tape.bytes_of(self._handed_on) + self.tape.between_bytes

    @cached_property
    def after(self) -> int:
        """Bytes held when backward is over, by others too."""
        return self.tape.bytes_of(self.tape.gradients) + self.tape.after_bytes

    def holds_less_than(self, other: MemoryTrace) -> bool:
        """At the fullest moment. Where it holds as much in the phase in which `other` is fullest, as most do, the second phase
        is not walked."""
        if max(self.between, self.after) >= other.peak:
            return False
        if other.forward.most_bytes == other.peak and self.forward.most_bytes >= other.peak:
            return False
        return self.backward.most_bytes < other.peak and self.forward.most_bytes < other.peak

    @cached_property
    def again(self) -> tuple[int, ...]:
        """Runs of forward that are run once more, in order."""
        return tuple(-1 - k for k in self.backward_order if k < 0)

    @cached_property
    def us(self) -> float:
        """What running again takes, writing and reading what is kept, and moving what is offloaded."""
        tape = self.tape
        return (sum(map(tape.us_of, self.again)) + sum(map(tape.offload_us_of, self.offloaded))
                + sum(map(tape.save_us_of, self.kept - self.offloaded)))


def simulate_memory(tape: StorageProgram, kept: Collection[int], offloaded: Collection[int] = ()) -> MemoryTrace:
    """kept: storages that forward makes and backward may read. What it needs besides, and cannot make again, is kept, too.
    offloaded: more of these, which are elsewhere in between."""
    offloaded = frozenset(offloaded)
    backward, bound = _backward_order(tape, offloaded.union(kept))
    return MemoryTrace(tape, offloaded.union(kept, bound), tuple(backward), offloaded)


def forward_order(tape: StorageProgram, kept: Collection[int]) -> list[int]:
    """What is returned or kept needs these runs, or they do more than give a result."""
    wanted = {*kept, *tape.returned}
    order = []
    for index in range(len(tape.runs) - 1, -1, -1):
        run = tape.runs[index]
        needed = wanted.intersection(run.reads if run.waits_for is not None else run.makes)
        if not run.backward and (needed or not run.makes and run.waits_for is None):
            wanted.update(run.reads)
            order.append(index)
    return order[::-1]


def _backward_order(tape: StorageProgram, kept: Collection[int]) -> tuple[list[int], set[int]]:
    """Runs of backward, and before each what has to be made again for it; what cannot be."""
    there = {*kept, *(s for s, storage in enumerate(tape.storages) if storage.maker is None)}
    order: list[int] = []
    bound: set[int] = set()
    for index, run in enumerate(tape.runs):
        if run.backward:
            for storage in run.reads:
                _bring(tape, storage, there, order, bound)
            order.append(index)
            there.update(run.makes)
    return order, bound


def _bring(tape: StorageProgram, storage: int, there: set[int], order: list[int], bound: set[int]) -> None:
    stack = [storage]
    while stack:
        if stack[-1] in there:
            stack.pop()
            continue
        maker = tape.maker(stack[-1])
        if not tape.repeatable(stack[-1]):
            there.add(stack[-1])
            bound.add(stack[-1])
            continue
        missing = [s for s in tape.runs[maker].reads if s not in there]
        stack += missing[::-1]
        if not missing:
            order.append(-1 - maker)
            there.update(tape.runs[maker].makes)


def _phase(tape: StorageProgram, order: Sequence[int], start: frozenset[int], held: frozenset[int],
           offloaded: frozenset[int]) -> PhaseTimeline:
    """start: storages that are there before; held: that are there afterwards, if they are made or there before. offloaded:
    that are copied to elsewhere when they are made, or from there when they are first read."""
    runs = [tape.runs[k if k >= 0 else -1 - k] for k in order]
    touched = _touched(tape, order, runs, start | held | offloaded)
    last = {s: position for position, found in enumerate(touched) for s in found}
    first = {s: -1 for s in start if tape.storages[s].given != "forward"}
    first.update((s, -1) for s in tape.given_for_backward if s in last)
    for position, run in enumerate(runs):
        if touched[position] or not run.inlined:
            for s in run.makes:
                first.setdefault(s, position)
        if offloaded:
            for s in offloaded.intersection(run.reads):
                first.setdefault(s, position)
    last.update(dict.fromkeys(held, len(order)))
    lives = {s: StorageLifetime(s, begin, end) for s, begin in first.items() if (end := last.get(s, begin)) >= 0}
    if tape.stand_ins:
        _through_layers(PhaseTimeline(tape, tuple(order), ()), lives)
    _reuse(tape, runs, lives, offloaded)
    return PhaseTimeline(tape, tuple(order), tuple(lives.values()))


def _through_layers(phase: PhaseTimeline, lives: dict[int, StorageLifetime]) -> None:
    """What all layers read is there for each of those that one stands for: the first brings it, the last is rid of it."""
    for s in phase.tape.for_all_layers.intersection(lives):
        life = lives[s]
        for stretch in phase.stretches:
            if stretch.start <= life.first < stretch.end:
                life = life._replace(first=stretch.start)
            if stretch.start <= life.last < stretch.end:
                life = life._replace(last=stretch.end - 1)
        lives[s] = life


def _touched(tape: StorageProgram, order: Sequence[int], runs: list[ProgramOp], there: frozenset[int]) -> list[Collection[int]]:
    """Of each run the storages in memory that its kernel reads and makes; of one that is computed by its readers, none.
    there: what is in memory whoever computes it."""
    fused = {s: run.fusing for run in runs if run.inlined for s in run.makes}
    count: dict[int, int] = dict.fromkeys(fused, 0)
    for run in runs:
        for s in run.reads:
            if s in fused:
                fused[s] &= run.fusing
                count[s] += 1
    later: frozenset[int] | None = None
    sources: dict[int, frozenset[int]] = {}  # of what is inlined, the storages in memory behind it
    costly: set[int] = set()  # what would be computed anew by each of its readers, at a price
    touched: list[Collection[int]] = []
    for number, run in zip(order, runs):
        behind = [sources[s] for s in run.reads if s in sources]
        if not behind and not run.inlined:
            touched.append(tape.touches[number if number >= 0 else -1 - number])
            continue
        found = frozenset(s for s in run.reads if s not in sources).union(*behind)
        readers = max(count[s] for s in run.makes) if run.inlined else 0
        is_costly = run.costly or not costly.isdisjoint(run.reads)
        written = readers > 1 and is_costly  # where only its own kernel reads it, it takes nothing all the same
        if written and later is None:
            later = _read_later(runs, fused)
        if (run.inlined and there.isdisjoint(run.makes) and all(fused[s] for s in run.makes)
                and len(found) <= (MOST_READS if readers < 2 else MOST_READS_IF_SHARED)
                and not (written and later and not later.isdisjoint(run.makes))):
            sources.update(dict.fromkeys(run.makes, found))
            if is_costly and not written:
                costly.update(run.makes)
            touched.append(())
        else:
            touched.append(found.union(run.makes))
    return touched


def _read_later(runs: list[ProgramOp], fused: dict[int, bool]) -> frozenset[int]:
    """Of what may be computed by its readers, that which is read after the next call of a library, by what these compute, too.
    Kernels are made of what stands between two of these calls."""
    stretches: list[int] = []
    at = 0
    for run in runs:
        stretches.append(at)
        at += not run.fusing
    last: dict[int, int] = {}
    found: set[int] = set()
    for run, stretch in zip(reversed(runs), reversed(stretches)):
        reach = stretch
        if run.inlined:
            reach = max([stretch, *(last[s] for s in run.makes if fused[s] and s in last)])
            found.update(s for s in run.makes if last.get(s, stretch) > stretch)
        for s in run.reads:
            if s in fused:
                last[s] = max(last.get(s, 0), reach)
    return frozenset(found)


def _reuse(tape: StorageProgram, runs: list[ProgramOp], lives: dict[int, StorageLifetime], offloaded: frozenset[int]) -> None:
    """A kernel of light operations writes its result over an operand of the same size that nobody reads afterwards; not over
    what is still being copied."""
    ending: dict[int, list[int]] = {}
    for life in lives.values():
        ending.setdefault(life.last, []).append(life.storage)
    for position, run in enumerate(runs):
        ends = ending.get(position) if run.fusing else None
        if ends:
            free = [s for s in ends if lives[s].first < position and s not in offloaded]
            for made in run.makes:
                same = (s for s in free if tape.storages[s].nbytes == tape.storages[made].nbytes)
                if made in lives and lives[made].first == position and (old := next(same, None)) is not None:
                    free.remove(old)
                    lives[old] = StorageLifetime(old, lives[old].first, position - 1)
