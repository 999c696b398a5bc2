"""Liveness of storages over the entries of a step: activations, redistributed copies, gradients.

Storages count: a view takes nothing, and its readers read the storage. A storage lives from its producing call to
its last reader. A forward storage that only backward reads lives on if it is `saved`; if not, it is dropped after
forward and recomputed where backward reads it, and then takes memory only if its reader is not a pointwise kernel (which
recomputes it on the fly). Calls listed in backward, but `saved`, run in forward. Values inside one fused kernel
take none. The sources of recomputation live until then. A gradient lives from its
producer to the end of the step, as it does when `zero_grad` sets gradients to None; where a graph has a loop over microbatches,
those of a further one live until all are computed. Values from before that loop live until the last microbatch has read
them. Scratch memory of a call lives while it runs.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from passes.graph.step_phase import BACKWARD, FORWARD
from passes.simulation.layer_unrolling import OUTSIDE, CallInstance, Group, carried
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, storage_of

RECOMPUTE = "recompute"
GRADIENTS, SAVED, RECOMPUTED, GATHERED, TRANSIENT = "gradients", "saved", "recomputed", "gathered", "transient"
"""Parts of the bytes in memory. gathered: redistributed copies of graph inputs, such as parameters."""
LIGHT = ("view", "pointwise")
"""Kernel kinds that are computed inside those of their readers."""
Key = tuple[str, int]
"""(storage, layer)."""


@dataclass(slots=True)
class LiveInterval:
    """Bytes in memory from the start of one entry (None: of the step) to the end of another; `late`: from its end on. part:
    what they are; `TRANSIENT` by default."""

    nbytes: float
    first: int | None
    last: int | None
    late: bool = False
    part: str = TRANSIENT


@dataclass(slots=True)
class _LiveStorage:
    kept: float  # bytes that are saved for backward
    dropped: float  # bytes that are recomputed
    born: int | None
    forward_last: int | None
    backward_first: int | None = None
    backward_last: int | None = None
    needed_last: int | None = None  # last use, including recomputation from it
    sources: tuple[Key, ...] = ()
    late: bool = False  # allocated when `born` ends
    part: str = SAVED  # part of the saved bytes


class LivenessLedger:
    """Live intervals of a whole step."""

    def __init__(self) -> None:
        self.intervals: list[LiveInterval] = []
        self.gradient_bytes = 0.0
        """Intervals of reduced gradients, which live from their producers to the end of the step."""

    def add(self, nbytes: float, first: int | None, last: int | None, late: bool = False, part: str = TRANSIENT,
            ) -> LiveInterval | None:
        if nbytes <= 0:
            return None
        self.intervals.append(LiveInterval(nbytes, first, last, late, part))
        return self.intervals[-1]


class GraphLedger:
    """The storages of one graph in one microbatch at a time. recomputed: the groups whose forward is recomputed."""

    def __init__(self, ledger: LivenessLedger, graph: StepGraph, recomputed: Iterable[Group] = ()):
        self.ledger, self.graph = ledger, graph
        self.recomputed = frozenset(recomputed)
        self.storage = {call.name: storage_of(call.name, graph.by_name) for call in graph.calls}
        self.inner = frozenset(call.name for call in graph.calls if self._is_inner(call))
        self.carried = carried(graph)
        self.unreduced: dict[Key, LiveInterval | None] = {}  # bytes of a gradient beyond its reduced part
        self.once = frozenset(leg.value for leg in graph.legs if leg.once)
        self.made: dict[Key, _LiveStorage] = {}
        self.copies: dict[tuple, _LiveStorage] = {}
        self.begin()

    def begin(self) -> None:
        """Start a new microbatch."""
        self.made = {key: each for key, each in self.made.items() if self._stays(key[0])}
        self.copies = {key: each for key, each in self.copies.items() if key[0] in self.once}
        self.copy_entries: dict[tuple, int] = {}
        self.latest: dict[str, Key] = {key[0]: key for key in self.made}
        self.added: list[tuple[float, int | None]] = []
        self.outputs: list[tuple[float, int | None]] = []
        self.backward_born: int | None = None

    def continue_from(self, other: GraphLedger) -> None:
        """Share values from before the loop, and accumulated gradients, with another ledger."""
        self.unreduced = other.unreduced
        self.made.update((key, each) for key, each in other.made.items() if self._stays(key[0]))
        self.copies.update((key, each) for key, each in other.copies.items() if key[0] in self.once)

    def backward_begins(self, index: int | None) -> None:
        """Start backward with entry `index`, its first one: it receives tangents, and saved values."""
        self.backward_born = index
        for name, nbytes in self.graph.tangents.items():
            self.made[name, 0] = _LiveStorage(nbytes, 0.0, index, index, part=TRANSIENT)
            self.latest[name] = (name, 0)

    def call(self, each: CallInstance, phase: str, index: int | None, late: bool) -> None:
        """Run a call in entry `index`, or after it in no time (`late`): operands are read, results allocated."""
        call, name = each.call, each.call.name
        heavy = call.kernel not in LIGHT or (phase == RECOMPUTE and call.again_us is None)
        sources = []
        for source, layout in call.reads:
            sources.append(self._key(source, each))
            self._read(source, each, layout, phase, index, heavy)
        self.ledger.add(call.scratch_bytes, index, index)
        if self.storage[name] != name:
            self.latest[name] = (name, each.layer)
            return
        if call.gradient:
            self._gradient(each, index)
            self.latest[name] = (name, each.layer)
            return
        kept = self._kept_bytes(each, phase)
        dropped = max(0.0, (0.0 if name in self.inner else call.bytes) - kept)
        old = self.made.get((name, each.layer))
        born = self.backward_born if call.phase == BACKWARD and kept else index
        storage = _LiveStorage(kept, dropped, born, index, sources=tuple(sources), late=late and born == index,
                               part=RECOMPUTED if phase == RECOMPUTE else SAVED)
        if old is not None:  # recomputed: the first one was freed, except for its saved bytes
            self._close(old)
        self.made[name, each.layer] = storage
        self.latest[name] = (name, each.layer)

    def copy_of(self, leg: Transfer, each: CallInstance) -> int | None:
        """The entry of the copy that this transfer starts from; None if it starts from the value itself."""
        return self.copy_entries.get(self._copy_key(leg.value, each, leg.source))

    def copy(self, leg: Transfer, each: CallInstance, phase: str, index: int) -> None:
        """Record that a transfer made a copy of its value in entry `index`, which `each` is about to read."""
        self._read(leg.value, each, leg.source, phase, index, True)
        key = self._copy_key(leg.value, each, leg.target)
        self.copy_entries[key] = index
        if leg.communicates:
            if key in self.copies:
                self._close(self.copies[key])
            made = self.graph.by_name.get(leg.value)
            saved = phase == BACKWARD or (made is not None and any(made.saved))
            nbytes = leg.result_bytes
            part = GATHERED if made is None else SAVED if made.phase != phase else TRANSIENT
            self.copies[key] = _LiveStorage(nbytes if saved else 0.0, 0.0 if saved else nbytes, index, index, part=part)

    def reduced(self, leg: Transfer, layer: int, index: int | None) -> None:
        """Record that a gradient's reduction ends with entry `index`."""
        interval = self.unreduced.get((self.storage[leg.value], layer))
        if interval is not None:
            interval.last = index

    def output(self, leg: Transfer, index: int | None) -> None:
        """Record that entry `index` produces a graph output: the caller holds it until the microbatch ends."""
        if leg.communicates:
            self.outputs.append((leg.result_bytes, index))

    def end(self, now: int | None, last: bool) -> None:
        """End the microbatch, the last one if `last`, with entry `now`, and emit its intervals."""
        for nbytes, index in self.added:
            self.ledger.add(nbytes, index, now, part=GRADIENTS)
        for nbytes, index in self.outputs:
            self.ledger.add(nbytes, index, now if index is None or now is None else max(now, index))
        for storage in reversed(list(self.made.values())):
            if not storage.kept and storage.needed_last is not None:  # recomputed in backward, from its sources
                for source in storage.sources:
                    self._need(source, storage.needed_last)
        over = [each for key, each in self.made.items() if last or not self._stays(key[0])]
        for storage in (*over, *(each for key, each in self.copies.items() if last or key[0] not in self.once)):
            self._close(storage)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _stays(self, value: str) -> bool:
        """True if it is computed before the loop over microbatches, for all of them."""
        return value in self.graph.by_name and self.graph.by_name[value].when == "before"

    def _is_inner(self, call: StepCall) -> bool:
        """True if it is computed and read inside one fused kernel."""
        readers = self.graph.readers.get(call.name, ())
        return bool(readers) and not any(call.saved) and all(
            (r.fused, r.block, r.phase, r.when) == (call.fused, call.block, call.phase, call.when) for r in readers)

    def _kept_bytes(self, each: CallInstance, phase: str) -> float:
        call = each.call
        if phase == RECOMPUTE and call.again_us is not None:
            return call.bytes if call.kernel not in LIGHT else 0.0
        if call.when == "before":
            return call.bytes if any(r.when != "before" for r in self._all_readers(call.name)) else 0.0
        if phase == FORWARD and (each.group in self.recomputed or self.recomputed == {OUTSIDE}):
            crosses = any(r.block != call.block for r in self._forward_readers(call.name))
            return call.bytes if crosses or call.name in self.carried.values() else 0.0
        return call.saved_bytes

    def _all_readers(self, name: str) -> Iterable[StepCall]:
        """Readers, including those through views."""
        for reader in self.graph.readers.get(name, ()):
            yield reader
            if self.storage[reader.name] != reader.name:
                yield from self._all_readers(reader.name)

    def _forward_readers(self, name: str) -> Iterable[StepCall]:
        return (reader for reader in self._all_readers(name) if reader.phase == FORWARD)

    def _key(self, source: str, each: CallInstance) -> Key:
        """The run of `source` that this instance reads: of its own layer, of the previous layer, else the latest."""
        root = self.storage.get(source, source)
        if (root, each.layer) in self.made:
            return root, each.layer
        before = self.carried.get(root)
        if before is not None and each.layer and (before, each.layer - 1) in self.made:
            return before, each.layer - 1
        return self.latest.get(root, (root, 0))

    def _copy_key(self, value: str, each: CallInstance, layout: Hashable) -> tuple:
        return value, self._key(value, each)[1], layout

    def _read(self, source: str, each: CallInstance, layout: Hashable, phase: str, index: int | None, heavy: bool) -> None:
        key = self._key(source, each)
        storage = self.copies.get(self._copy_key(source, each, layout)) or self.made.get(key)
        if storage is None or index is None:
            return
        made = self.graph.by_name.get(key[0])
        if phase == FORWARD or (made is not None and made.phase == BACKWARD):
            storage.forward_last = index
            return
        storage.needed_last = index
        if heavy or storage.kept:
            storage.backward_first = index if storage.backward_first is None else storage.backward_first
            storage.backward_last = index

    def _need(self, key: Key, index: int) -> None:
        storage = self.made.get(key)
        if storage is not None:
            storage.needed_last = index if storage.needed_last is None else max(storage.needed_last, index)

    def _close(self, storage: _LiveStorage) -> None:
        last, gathered = storage.forward_last, GATHERED if storage.part == GATHERED else TRANSIENT
        if storage.kept:
            later = [i for i in (last, storage.backward_last, storage.needed_last) if i is not None]
            self.ledger.add(storage.kept, storage.born, max(later, default=None), storage.late, storage.part)
        self.ledger.add(storage.dropped, storage.born, last, storage.late, gathered)
        if storage.backward_first is not None and storage.backward_first != last:
            again = RECOMPUTED if gathered == TRANSIENT else GATHERED
            self.ledger.add(storage.dropped, storage.backward_first, storage.backward_last, part=again)

    def _gradient(self, each: CallInstance, index: int | None) -> None:
        """A gradient lives until the optimizer has read it; its bytes beyond the reduced part, until it is reduced."""
        key = (each.call.name, each.layer)
        if key in self.unreduced:
            if (interval := self.unreduced[key]) is not None:
                interval.last = index  # a further microbatch accumulates into it
            if self.graph.microbatches > 1:  # a compiled backward returns all of them at once
                self.added.append((each.call.bytes, index))
            return
        nbytes = each.call.bytes
        reduced = (leg.result_bytes for leg in self.graph.legs
                   if leg.reader == "" and self.storage.get(leg.value) == each.call.name)
        kept = min([nbytes, *reduced])
        self.ledger.add(kept, index, None, part=GRADIENTS)
        self.ledger.gradient_bytes += kept
        self.unreduced[key] = self.ledger.add(nbytes - kept, index, index, part=GRADIENTS)
