"""Memory trace: simulate forward and then backward of a storage program, and count the bytes in memory at every op.

Given the saved storages, forward runs the ops that its outputs and the saved storages need. Backward recomputes the rest, each
just before its first reader, as rematerialization does (`passes.transforms.memory.rematerialization`). A storage lives from its
producer to its last reader; a saved one, from forward to its last reader in backward. An offloaded one is elsewhere in between:
in forward it lives like one that is not saved, in backward from its first reader on. A result that is inlined into its readers
takes nothing, but its operands live as long as they do. A costly result is not inlined if it has several readers in different
kernels.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from passes.simulation.memory.phase_timeline import PhaseTimeline, StorageLifetime
from passes.simulation.memory.storage_program import ProgramOp, StorageProgram

MOST_READS, MOST_READS_IF_SHARED = 8, 4
"""Inductor materializes a result that is computed from more storages than that, or that has several readers with that
many reads each (`realize_acc_reads_threshold`, `realize_reads_threshold` of its configuration)."""


@dataclass(frozen=True)
class MemoryTrace:
    """saved: saved forward storages; including needed ones that cannot be recomputed. backward_order: op numbers, as in a
    `PhaseTimeline`. offloaded: those of the saved storages that are offloaded in between."""

    program: StorageProgram
    saved: frozenset[int]
    backward_order: tuple[int, ...] = field(repr=False)
    offloaded: frozenset[int] = frozenset()

    @cached_property
    def forward(self) -> PhaseTimeline:
        return _phase(self.program, forward_order(self.program, self.saved), frozenset(), self._handed_on, self.offloaded,
                      self._others(backward=False))

    @cached_property
    def backward(self) -> PhaseTimeline:
        held = self.program.returned | self.program.gradients
        return _phase(self.program, self.backward_order, self._handed_on, held, self.offloaded,
                      self._others(backward=True))

    @property
    def without_unread(self) -> MemoryTrace:
        """The same without saved storages that backward does not read. (A search has them, to start recomputation from.)"""
        read = {s for k in self.backward_order for s in self.program.runs[k if k >= 0 else -1 - k].reads}
        return MemoryTrace(self.program, self.saved & read, self.backward_order, self.offloaded & read)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that one microbatch saves in memory."""
        return self.program.bytes_of(self.saved - self.offloaded)

    def _others(self, backward: bool) -> tuple[int, int]:
        others = self.program.microbatches.others(backward, self.saved_bytes)
        return others.in_flight * self.saved_bytes + others.saved_bytes, others.gradient_bytes

    @property
    def _handed_on(self) -> frozenset[int]:
        """Outputs of forward stay with its caller, which may hold them until backward ends."""
        return self.saved - self.offloaded | self.program.returned

    @cached_property
    def peak(self) -> int:
        """Peak bytes, without forward's inputs."""
        return max(self.forward.most_bytes, self.backward.most_bytes, self.between, self.after)

    @cached_property
    def between(self) -> int:
        """Bytes held when forward is over, by others too."""
        others = (self.program.microbatches.in_flight - 1) * self.saved_bytes
        return self.program.bytes_of(self._handed_on) + others + self.program.between_bytes

    @cached_property
    def after(self) -> int:
        """Bytes in memory after backward, including other users'."""
        return self.program.bytes_of(self.program.gradients) + self.program.after_bytes

    def holds_less_than(self, other: MemoryTrace) -> bool:
        """Compare the peaks. Usually the phase in which `other` peaks decides, and the second phase is not simulated."""
        if max(self.between, self.after) >= other.peak:
            return False
        if other.forward.most_bytes == other.peak and self.forward.most_bytes >= other.peak:
            return False
        return self.backward.most_bytes < other.peak and self.forward.most_bytes < other.peak

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Recomputed forward ops, in order."""
        return tuple(-1 - k for k in self.backward_order if k < 0)

    @cached_property
    def us(self) -> float:
        """Time of recomputing, of writing and reading saved values, and of moving offloaded ones."""
        program = self.program
        return (sum(map(program.us_of, self.recomputed)) + sum(map(program.offload_us_of, self.offloaded))
                + sum(map(program.save_us_of, self.saved - self.offloaded)))


def simulate_memory(program: StorageProgram, kept: Collection[int], offloaded: Collection[int] = ()) -> MemoryTrace:
    """Simulate. kept: forward storages to save. Others that backward needs and that cannot be recomputed are saved, too.
    offloaded: further storages to save, out of the device's memory in between."""
    offloaded = frozenset(offloaded)
    backward, bound = _backward_order(program, offloaded.union(kept))
    return MemoryTrace(program, offloaded.union(kept, bound), tuple(backward), offloaded)


def forward_order(program: StorageProgram, kept: Collection[int]) -> list[int]:
    """Forward ops that outputs or saved storages need, or that have side effects."""
    wanted = {*kept, *program.returned}
    order = []
    for index in range(len(program.runs) - 1, -1, -1):
        run = program.runs[index]
        needed = run.draws or wanted.intersection(run.reads if run.waits_for is not None else run.makes)
        if not run.backward and (needed or not run.makes and run.waits_for is None):
            wanted.update(run.reads)
            order.append(index)
    return order[::-1]


def _backward_order(program: StorageProgram, kept: Collection[int]) -> tuple[list[int], set[int]]:
    """Backward ops with recomputed ones inserted; and storages that cannot be recomputed."""
    there = {*kept, *(s for s, storage in enumerate(program.storages) if storage.maker is None)}
    order: list[int] = []
    bound: set[int] = set()
    for index, run in enumerate(program.runs):
        if run.backward:
            for storage in run.reads:
                _bring(program, storage, there, order, bound)
            order.append(index)
            there.update(run.makes)
    return order, bound


def _bring(program: StorageProgram, storage: int, there: set[int], order: list[int], bound: set[int]) -> None:
    stack = [storage]
    while stack:
        if stack[-1] in there:
            stack.pop()
            continue
        maker = program.maker(stack[-1])
        if not program.repeatable(stack[-1]):
            there.add(stack[-1])
            bound.add(stack[-1])
            continue
        missing = [s for s in program.runs[maker].reads if s not in there]
        stack += missing[::-1]
        if not missing:
            order.append(-1 - maker)
            there.update(program.runs[maker].makes)


def _phase(program: StorageProgram, order: Sequence[int], start: frozenset[int], held: frozenset[int],
           offloaded: frozenset[int],
           others: tuple[int, int]) -> PhaseTimeline:
    """start: storages that are there before; held: that are there afterwards, if they are made or there before. offloaded:
    that are copied to elsewhere when they are made, or from there when they are first read. others: bytes that other
    microbatches have saved, and of gradients."""
    runs = [program.runs[k if k >= 0 else -1 - k] for k in order]
    touched = _touched(program, order, runs, start | held | offloaded)
    last = {s: position for position, found in enumerate(touched) for s in found}
    first = {s: -1 for s in start if program.storages[s].input_phase != "forward"}
    first.update((s, -1) for s in program.given_for_backward if s in last)
    for position, run in enumerate(runs):
        if touched[position] or not run.inlined:
            for s in run.makes:
                first.setdefault(s, position)
        if offloaded:
            for s in offloaded.intersection(run.reads):
                first.setdefault(s, position)
    last.update(dict.fromkeys(held, len(order)))
    lives = {s: StorageLifetime(s, begin, end) for s, begin in first.items() if (end := last.get(s, begin)) >= 0}
    if program.stand_ins:
        _through_layers(PhaseTimeline(program, tuple(order), ()), lives)
    _reuse(program, runs, lives, offloaded, touched)
    return PhaseTimeline(program, tuple(order), tuple(lives.values()), *others)


def _through_layers(phase: PhaseTimeline, lives: dict[int, StorageLifetime]) -> None:
    """Values that all layers read exist for each folded one: the first layer brings them, the last frees them."""
    for s in phase.program.for_all_layers.intersection(lives):
        life = lives[s]
        for stretch in phase.stretches:
            if stretch.start <= life.first < stretch.end:
                life = life._replace(first=stretch.start)
            if stretch.start <= life.last < stretch.end:
                life = life._replace(last=stretch.end - 1)
        lives[s] = life


def _touched(program: StorageProgram, order: Sequence[int], runs: list[ProgramOp],
             there: frozenset[int]) -> list[Collection[int]]:
    """For each op the storages in memory that its kernel reads and writes; none for an inlined op.
    there: storages in memory regardless of their producer."""
    fused = {s: run.fusing for run in runs if run.inlined for s in run.makes}
    count: dict[int, int] = dict.fromkeys(fused, 0)
    for run in runs:
        for s in run.reads:
            if s in fused:
                fused[s] &= run.fusing
                count[s] += 1
    later: frozenset[int] | None = None
    sources: dict[int, frozenset[int]] = {}  # for inlined storages, the storages in memory that they are computed from
    costly: set[int] = set()  # storages that are expensive to compute again in each reader
    touched: list[Collection[int]] = []
    for number, run in zip(order, runs):
        behind = [sources[s] for s in run.reads if s in sources]
        if not behind and not run.inlined:
            touched.append(program.touches[number if number >= 0 else -1 - number])
            continue
        found = frozenset(s for s in run.reads if s not in sources).union(*behind)
        readers = max(count[s] for s in run.makes) if run.inlined else 0
        is_costly = run.costly or not costly.isdisjoint(run.reads)
        written = readers > 1 and is_costly  # with a single reader, it is inlined all the same
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
    """Inlinable storages that are read after the next library call, through other inlined ones, too.
    Kernels are fused only between two of these calls."""
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


def _reuse(program: StorageProgram, runs: list[ProgramOp], lives: dict[int, StorageLifetime],
           offloaded: frozenset[int], touched: Sequence[Collection[int]]) -> None:
    """A kernel of light operations reuses a dead operand of the same size for its result; not one that is still being copied,
    nor one that another operation of the same kernel, as between two library calls, reads from memory."""
    ending: dict[int, list[int]] = {}
    for life in lives.values():
        ending.setdefault(life.last, []).append(life.storage)
    for position, run in enumerate(runs):
        ends = ending.get(position) if run.fusing else None
        if ends:
            free = [s for s in ends if lives[s].first < position and s not in offloaded
                    and not _read_in_kernel(s, position, runs, touched)]
            for made in run.makes:
                same = (s for s in free if program.storages[s].nbytes == program.storages[made].nbytes)
                if made in lives and lives[made].first == position and (old := next(same, None)) is not None:
                    free.remove(old)
                    lives[old] = StorageLifetime(old, lives[old].first, position - 1)


def _read_in_kernel(storage: int, position: int, runs: Sequence[ProgramOp], touched: Sequence[Collection[int]]) -> bool:
    """True if an op that runs in one kernel with the one at this position, before it, reads a storage that it did not write."""
    while (position := position - 1) >= 0 and runs[position].fusing:
        if storage in touched[position]:
            return storage not in runs[position].makes
    return False
