"""Build the storage program of a step graph: what a plan knows of a rank's graph before, or without, rewriting it.

Layers that a listed one stands for are unrolled. A redistribution makes a copy just before its first reader; those of a block's
parameters, together and one block earlier, as FSDP prefetches. Reductions of gradients share buckets, as on a rank. Values that
are computed once for all microbatches stay through the loop.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from passes.cost_model.base import BUCKET_BYTES
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.simulation.layer_unrolling import OUTSIDE, CallInstance, Group, carried, layer_label, unroll_layers
from passes.simulation.memory.program_steps import ProgramStep, ReducedGradients
from passes.simulation.memory.storage_program import ProgramOp, Storage, StorageProgram
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, storage_of
from passes.simulation.transfer_instances import TransferInstances

Key = tuple[str, int]
"""(call whose storage it is, layer)."""


def step_program(graph: StepGraph, device: str = "", recompute: bool = False) -> tuple[StorageProgram, frozenset[int]]:
    """The program of one microbatch, and the storages that are saved; see `passes.simulation.memory.step_trace.trace_step`."""
    made = _StepProgramBuilder(graph, device, recompute)
    return made.program(), frozenset(made.kept)


class _StepProgramBuilder:
    def __init__(self, graph: StepGraph, device: str, recompute: bool):
        self.graph, self.on_cpu = graph, device == "cpu"
        self.phases, self.legs = unroll_layers(graph), TransferInstances(graph)
        self.storage_of = {call.name: storage_of(call.name, graph.by_name) for call in graph.calls}
        self.carried = carried(graph)
        groups = {each.group for each in self.phases[FORWARD]} - {OUTSIDE}
        self.recomputed = (groups or {OUTSIDE}) if recompute else set()
        self.segments: list[tuple[tuple[str, Group], list[ProgramStep]]] = []  # consecutive ops of one run of a block
        self.names: list[tuple[str, int, str]] = []  # of each storage: name, bytes, "backward" if it is given to backward
        self.kept: set[int] = set()
        self.returned: set[int] = set()
        self.gradients: set[int] = set()
        self.gathered: set[int] = set()
        self.made: dict[Key, list[int]] = {}
        self.latest: dict[str, Key] = {}
        self.copies: dict[tuple[str, int, Hashable], int] = {}
        self.views_of_copies: dict[Key, Transfer] = {}  # of parameters, which are gathered for the views' first readers
        self.prefetched: dict[int, ProgramStep] = {}  # by the segment that reads what is gathered
        self.buckets: dict[Hashable, ReducedGradients] = {}
        self.sent_bytes = 0.0  # by a bucket of one gather
        self.after: dict[int, list[ProgramStep]] = defaultdict(list)  # reductions, by the op that makes their last operand
        self.reduced = self._reduced()

    def program(self) -> StorageProgram:
        for each in self.phases[FORWARD]:
            self._run(each, FORWARD)
        self._saved_of_backward()
        for name, nbytes in self.graph.tangents.items():
            self.made[name, 0] = [self._storage(name, nbytes, "backward")]
        if self.graph.training:
            self._enter(("backward", OUTSIDE))
        for each in self.phases[BACKWARD]:
            self._run(each, BACKWARD)
        for key in list(self.buckets):
            self._reduce(key)
        ops = [each for _, ops in self.segments for op in ops for each in (op, *self.after.get(id(op), ()))]
        return self._numbered(self._live(ops))

    def _live(self, ops: Sequence[ProgramStep]) -> list[ProgramStep]:
        """Without those of backward that only calls read which forward has run instead."""
        wanted = set(self.gradients)
        found = []
        for op in reversed(ops):
            if not op.backward or self._is_unread(op) or not op.makes or not wanted.isdisjoint(op.makes):
                wanted.update(op.reads)
                found.append(op)
        return found[::-1]

    def _is_unread(self, op: ProgramStep) -> bool:
        """True for a call whose results nothing in the graph reads: it returns them."""
        return op.call is not None and not self.graph.readers.get(op.call.name)

    def _numbered(self, ops: Sequence[ProgramStep]) -> StorageProgram:
        makers = {s: number for number, op in enumerate(ops) for s in op.makes}
        numbers = {id(op): number for number, op in enumerate(ops)}
        storages = tuple(Storage(name, nbytes, makers.get(s), given, gathered=s in self.gathered)
                         for s, (name, nbytes, given) in enumerate(self.names))
        sent = {leg.value for leg in self.graph.legs if leg.reader == "" and leg.communicates}
        results = {s for s, number in makers.items()
                   if not ops[number].backward and self._is_unread(ops[number]) and self.names[s][0] not in sent}
        runs = tuple(ProgramOp(
            op.name, op.backward, 0.0, tuple(dict.fromkeys(op.reads)), tuple(op.makes), op.repeatable,
            op.call is not None and op.call.inlined, op.call is not None and op.call.fusing,
            op.call is not None and op.call.costly and self.on_cpu, op.block, op.workspace_bytes, False,
            None if op.waits_for is None else numbers[id(op.waits_for)], op.scratch_bytes) for op in ops)
        return StorageProgram(runs, storages, frozenset(self.returned | results - self.kept), frozenset(self.gradients))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _run(self, each: CallInstance, phase: Phase) -> None:
        call = each.call
        self._enter((phase, each.group))
        is_view = self.storage_of[call.name] != call.name
        for leg, _ in self.legs.into(each):
            if is_view and leg.value not in self.graph.by_name:
                self.views_of_copies[call.name, each.layer] = leg
            elif leg.value != call.name:
                self._copy(leg, each, phase)
        if not is_view:
            self._call(each, phase)
        self.latest[call.name] = call.name, each.layer
        for leg, _ in self.legs.out_of(each):
            if leg.gradient and (leg.each or self.graph.microbatches == 1):
                self._gradient_of(leg, each)
            elif leg.gradient:  # accumulated unsharded, and reduced after the loop
                self.gradients.update(self.made.get(self._key(leg.value, each), []))
            elif leg.communicates:
                made = self._storage(call.name, leg.result_bytes)
                reads = self._read(call.name, leg.source, each, phase)
                self._add(ProgramStep(call.name + layer_label(each), call.block, phase == BACKWARD, reads, [made]))
                (self.gradients if phase == BACKWARD else self.returned).add(made)

    def _call(self, each: CallInstance, phase: Phase) -> None:
        call, key = each.call, (each.call.name, each.layer)
        reads = [s for source, layout in call.reads for s in self._read(source, layout, each, phase)]
        op = ProgramStep(call.name + layer_label(each), call.block, phase == BACKWARD, reads, call=call,
                          scratch_bytes=round(call.scratch_bytes) if self.on_cpu else 0)
        before = self.made.get(key, []) if phase == BACKWARD else []  # what forward has saved of it
        kept = 0.0 if before else self._kept_bytes(each, phase)
        dropped = call.bytes - (call.saved_bytes if before else kept)
        for nbytes, saved in ((kept, True), (dropped, False)):
            if nbytes > 0:
                op.makes.append(self._storage(call.name, nbytes))
                if saved:
                    self.kept.add(op.makes[-1])
        if call.when == "before" and any(r.when != "before" for r in self._all_readers(call.name)):
            self.returned.update(op.makes)
        if call.gradient and self.reduced.get(call.name, call.bytes) >= call.bytes:
            self.gradients.update(op.makes)
        self.made[key] = before + op.makes
        if op.makes or not before:
            self._add(op)

    def _saved_of_backward(self) -> None:
        """Calls listed in backward of which something is saved: forward runs a call that is equal."""
        self._enter(("saved", OUTSIDE))
        for each in self.phases[BACKWARD]:
            call = each.call
            if call.saved_bytes and not call.gradient and self.storage_of[call.name] == call.name:
                made = self._storage(call.name, call.saved_bytes)
                self.kept.add(made)
                self.made[call.name, each.layer] = [made]
                self._add(ProgramStep(call.name + layer_label(each), call.block, False, [], [made], repeatable=False))

    def _kept_bytes(self, each: CallInstance, phase: Phase) -> float:
        call = each.call
        if phase == BACKWARD or call.gradient:
            return 0.0
        if each.group in self.recomputed:
            readers = [r for r in self._all_readers(call.name) if r.phase == FORWARD]
            return call.bytes if any(r.block != call.block for r in readers) or call.name in self.carried.values() else 0.0
        return call.saved_bytes

    def _all_readers(self, name: str) -> Iterable[StepCall]:
        """Readers, including those through views."""
        for reader in self.graph.readers.get(name, ()):
            yield reader
            if self.storage_of[reader.name] != reader.name:
                yield from self._all_readers(reader.name)

    # --- operands ---------------------------------------------------------------------------------------------------

    def _key(self, source: str, each: CallInstance) -> Key:
        """The run of `source` that this instance reads: of its own layer, of the previous layer, else the latest."""
        root = self.storage_of.get(source, source)
        if root not in self.graph.by_name and root not in self.graph.tangents:
            return root, each.layer  # each layer has a parameter of its own
        after_layers = each.runs == 1 and each.group == OUTSIDE and root in self.latest and self.latest[root][1] > 0
        if (root, each.layer) in self.made and not after_layers:
            return root, each.layer
        before = self.carried.get(root)
        if before is not None and each.layer and (before, each.layer - 1) in self.made:
            return before, each.layer - 1
        return self.latest.get(root, (root, 0))

    def _read(self, source: str, layout: Hashable, each: CallInstance, phase: Phase) -> list[int]:
        """Storages of an operand: none for a graph input. Of a result of forward, backward reads the saved part, if any is. A
        view is of what its call reads, which may be a copy."""
        key = self._key(source, each)
        if (copy := self.copies.get((source, key[1], layout))) is not None:
            return [copy]
        call = self.graph.by_name.get(source)
        if call is not None and call.view_of is not None and call.reads:
            if (leg := self.views_of_copies.pop((source, each.layer), None)) is not None:
                self._copy(leg, each, phase)
            base = next((read for read in call.reads if read[0] == call.view_of), call.reads[0])
            return self._read(*base, each, phase)
        found = self.made.get(key, [])
        made = self.graph.by_name.get(key[0])
        if phase == BACKWARD and made is not None and made.phase == FORWARD:
            return [s for s in found if s in self.kept] or found
        return found

    def _copy(self, leg: Transfer, each: CallInstance, phase: Phase) -> None:
        """The copy that a redistribution makes of its value, for a reader. A copy of forward that backward reads is saved, as
        torch's partitioner runs no collective twice."""
        if not leg.communicates or not leg.result_bytes:
            return
        key, made = self._key(leg.value, each), self.graph.by_name.get(leg.value)
        storage = self._storage(leg.value, leg.result_bytes)
        gathered = self.on_cpu and leg.hops[-1].collective == "all_gather" and not leg.once
        op = ProgramStep(leg.value + layer_label(each), each.call.block, phase == BACKWARD,
                          self._read(leg.value, leg.source, each, phase), [storage],
                          repeatable=False, workspace_bytes=round(leg.result_bytes) if gathered else 0)
        self.copies[leg.value, key[1], leg.target] = storage
        self.returned.update({storage} if leg.once else ())
        self.gathered.update({storage} if made is None else ())
        if made is None and leg.once:
            self.segments[0][1].insert(0, op)
        elif made is None:
            ranks = leg.hops[-1].ranks
            self._prefetch(op, leg.result_bytes / ranks if ranks > 1 and gathered else 0.0, each.group != OUTSIDE)
        else:
            self._add(op)

    def _prefetch(self, op: ProgramStep, sent_bytes: float, in_layer: bool) -> None:
        """Gather a parameter when the previous block begins; in a layer, together with others. Their workspace is needed until
        they are waited for; it includes what is sent if they are several."""
        if not in_layer:
            self._add(op, ahead=True)
            return
        here = len(self.segments) - 1
        bucket = self.prefetched.get(here)
        if bucket is None or sum(self.names[s][1] for s in (*bucket.makes, *op.makes)) > BUCKET_BYTES:
            self._add(op, ahead=True)
            if op.workspace_bytes:
                self._add(ProgramStep(op.name, op.block, op.backward, list(op.makes), [], repeatable=False, waits_for=op))
            self.prefetched[here], self.sent_bytes = op, sent_bytes
            return
        bucket.workspace_bytes += op.workspace_bytes + round(sent_bytes + self.sent_bytes)
        self.sent_bytes = 0.0
        bucket.reads += op.reads
        bucket.makes += op.makes

    # --- gradients --------------------------------------------------------------------------------------------------

    def _reduced(self) -> dict[str, float]:
        """Bytes of each gradient when it is reduced, by the call that owns its storage."""
        found: dict[str, float] = {}
        for leg in self.graph.legs:
            if leg.gradient and leg.reader == "":
                name = self.storage_of.get(leg.value, leg.value)
                found[name] = min(leg.result_bytes, found.get(name, leg.result_bytes))
        return found

    def _gradient_of(self, leg: Transfer, each: CallInstance) -> None:
        """Reduce a gradient, in a bucket of its kind."""
        hop, key = leg.hops[0], self._key(leg.value, each)
        kind = hop.collective, hop.axis, leg.dtype
        if kind in self.buckets and self.buckets[kind].nbytes + hop.bytes > BUCKET_BYTES:
            self._reduce(kind)
        bucket = self.buckets.setdefault(kind, ReducedGradients())
        read = self.made.get(key, [])
        bucket.reads += read
        bucket.nbytes += hop.bytes
        bucket.last = self.segments[-1][1][-1] if self.segments[-1][1] else bucket.last
        if not self.gradients.intersection(read):
            bucket.makes.append(self._storage(leg.value, leg.result_bytes))

    def _reduce(self, kind: Hashable) -> None:
        """Reduce a bucket when its last gradient is there. Several gradients are copied into one buffer."""
        bucket = self.buckets.pop(kind)
        self.gradients.update(bucket.makes)
        made = sum(self.names[s][1] for s in bucket.makes)
        buffer = round(bucket.nbytes) if len(bucket.reads) > 1 else 0
        name = self.names[bucket.reads[0]][0] if bucket.reads else ""
        op = ProgramStep(name, "", True, bucket.reads, bucket.makes, scratch_bytes=max(buffer - made, 0))
        if bucket.last is None:
            self._add(op)
        else:
            self.after[id(bucket.last)].append(op)

    # --- the program ------------------------------------------------------------------------------------------------

    def _storage(self, name: str, nbytes: float, given: str = "") -> int:
        self.names.append((name, round(nbytes), given))
        return len(self.names) - 1

    def _enter(self, block: tuple[str, Group]) -> None:
        if not self.segments or self.segments[-1][0] != block:
            self.segments.append((block, []))

    def _add(self, op: ProgramStep, ahead: bool = False) -> None:
        """ahead: where the previous block begins, or has waited for what it reads."""
        (phase, _), ops = self.segments[-1]
        if ahead and len(self.segments) > 1 and self.segments[-2][0][0] == phase:
            ops = self.segments[-2][1]
            return ops.insert(max((k + 1 for k, each in enumerate(ops) if each.waits_for is not None), default=0), op)
        ops.append(op)

