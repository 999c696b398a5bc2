"""Which bytes live from which entry to which: activations, copies in another placement, gradients on their way.

A value lives from its producer to its last reader. One that forward makes and only backward reads lives on if the plan
says `saved`; if not, it is dropped after forward and made again where backward reads it, and then takes memory only if a
kernel that is no pointwise one (which would recompute it on the fly) reads it. What the plan has in backward, but `saved`,
is made in forward. Views take none, nor do values that one fused kernel makes and reads. What is recomputed needs its own
sources: these live on as long. A gradient lives from where it is made to the end of the step, as it does when
`zero_grad` sets gradients to None.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hpml_compiler.plans.schema import GraphPlan, Redistribution
from hpml_compiler.simulate.local import LocalView, placed_bytes
from hpml_compiler.simulate.unroll import OUTSIDE, Group, Instance

Key = tuple[str, int]


@dataclass(slots=True)
class Interval:
    """Bytes held from the start of one entry (None: of the step) to the stop of another; `late`: from its stop on."""

    nbytes: float
    first: int | None
    last: int | None
    late: bool = False


@dataclass(slots=True)
class _Value:
    kept: float  # bytes that are saved for backward
    dropped: float  # bytes that are not
    born: int | None
    forward_last: int | None
    backward_first: int | None = None
    backward_last: int | None = None
    needed_last: int | None = None  # by what is recomputed from it, too
    sources: tuple[Key, ...] = ()
    late: bool = False  # born when `born` stops


class Ledger:
    """Intervals of a whole step."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.gradient_bytes = 0.0
        """Of reduced gradients, which live from where they are made to the end of the step."""

    def of_graph(self, graph: GraphPlan, view: LocalView, part: float) -> GraphLedger:
        return GraphLedger(self, graph, view, part)

    def add(self, nbytes: float, first: int | None, last: int | None, late: bool = False) -> None:
        if nbytes > 0:
            self.intervals.append(Interval(nbytes, first, last, late))


class GraphLedger:
    """The values of one graph in one microbatch at a time."""

    def __init__(self, ledger: Ledger, graph: GraphPlan, view: LocalView, part: float):
        self.ledger, self.graph, self.view, self.part = ledger, graph, view, part
        self.recomputed: frozenset[Group] = frozenset()
        self.roots = {name: view.root(name) for name in graph.operations}
        self.inner = frozenset(name for name in graph.operations if self._is_inner(name))
        self.carries = _carries(graph)
        self.gradient_bytes: dict[Key, Interval] = {}
        self.returned = frozenset(self.roots[name] for name in view.gradients)
        self.begin()

    def begin(self) -> None:
        """A new microbatch."""
        self.values: dict[tuple, _Value] = {}
        self.copies: dict[tuple, _Value] = {}
        self.copy_entries: dict[tuple, int] = {}
        self.latest: dict[str, Key] = {}
        self.outputs: list[tuple[float, int | None]] = []
        self.backward_born: int | None = None

    def backward_begins(self, index: int | None) -> None:
        """With entry `index`, its first one: it is given tangents, and what forward has computed on its behalf."""
        self.backward_born = index
        for name, nbytes in self.graph.tangents.items():
            self.values[name, 0] = _Value(nbytes * self.part, 0.0, index, index)
            self.latest[name] = (name, 0)

    def operation(self, each: Instance, phase: str, index: int | None, late: bool) -> None:
        """An operation runs in entry `index`, or takes no time after it (`late`): operands are read, results made."""
        name, operation = each.name, self.graph.operations[each.name]
        heavy = operation.kind not in ("view", "pointwise") or phase == "recompute"
        sources = []
        for source, placements in zip(operation.sources, operation.inputs):
            sources.append(self._key(source, each))
            self._read(source, each, placements, phase, index, heavy)
        if self.roots[name] != name:
            self.latest[name] = (name, each.layer)
            return
        part = 1.0 if name in self.view.fixed else self.part
        if name in self.returned and operation.backward:
            self._gradient(each, index)
            self.latest[name] = (name, each.layer)
            return
        total = float(sum(operation.result_bytes)) * part if name not in self.inner else 0.0
        kept = self._kept_bytes(each, phase) * part
        old = self.values.get((name, each.layer))
        born = self.backward_born if operation.backward and kept else index
        value = _Value(kept, max(0.0, total - kept), born, index, sources=tuple(sources), late=late and born == index)
        if old is not None:  # made again: the first one was dropped, but for what forward has to keep
            self._close(old)
        self.values[name, each.layer] = value
        self.latest[name] = (name, each.layer)

    def copy_of(self, move: Redistribution, each: Instance) -> int | None:
        """The entry that makes the copy which this move starts from; None if it starts from the value itself."""
        return self.copy_entries.get(self._copy_key(move.value, each, move.source))

    def copy(self, move: Redistribution, each: Instance, phase: str, index: int) -> None:
        """A redistribution made a copy of its value in entry `index`, which `each` is about to read."""
        self._read(move.value, each, move.source, phase, index, True)
        key = self._copy_key(move.value, each, move.target)
        self.copy_entries[key] = index
        if any(step.bytes for step in move.steps):
            part = 1.0 if move.value in self.view.fixed else self.part
            nbytes = placed_bytes(move.shape, move.dtype, move.target, self.graph.mesh) * part
            if key in self.copies:
                self._close(self.copies[key])
            made = self.graph.operations.get(move.value)
            saved = phase == "backward" or (made is not None and any(made.saved))
            self.copies[key] = _Value(nbytes if saved else 0.0, 0.0 if saved else nbytes, index, index)

    def reduced(self, move: Redistribution, layer: int, index: int | None) -> None:
        """A gradient's reduction is done with entry `index`."""
        interval = self.gradient_bytes.get((self.roots[move.value], layer))
        if interval is not None:
            interval.last = index

    def output(self, move: Redistribution, index: int | None) -> None:
        """Entry `index` makes what the graph returns: the caller holds it until the microbatch is over."""
        if any(step.bytes for step in move.steps):
            nbytes = placed_bytes(move.shape, move.dtype, move.target, self.graph.mesh) * self.part
            self.outputs.append((nbytes, index))

    def end(self, now: int | None) -> None:
        """The microbatch is over with entry `now`: what lived in it is known."""
        for nbytes, index in self.outputs:
            self.ledger.add(nbytes, index, now if index is None or now is None else max(now, index))
        for key in reversed(list(self.values)):
            value = self.values[key]
            if not value.kept and value.needed_last is not None:  # made again in backward, from its sources
                for source in value.sources:
                    self._need(source, value.needed_last)
        for value in (*self.values.values(), *self.copies.values()):
            self._close(value)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _is_inner(self, name: str) -> bool:
        """Made and read by one fused kernel only."""
        operation, readers = self.graph.operations[name], self.view.readers.get(name, ())
        same = [self.graph.operations[r] for r in readers]
        return bool(same) and all(
            r.class_id == operation.class_id and r.block == operation.block and r.backward == operation.backward
            for r in same) and not any(operation.saved)

    def _kept_bytes(self, each: Instance, phase: str) -> float:
        operation = self.graph.operations[each.name]
        if phase == "forward" and (each.group in self.recomputed or self.recomputed == {OUTSIDE}):
            crosses = any(self.graph.operations[r].block != operation.block
                          for r in self._forward_readers(each.name)) or each.name in self.carries.values()
            return float(sum(operation.result_bytes)) if crosses else 0.0
        return float(sum(b for b, saved in zip(operation.result_bytes, operation.saved) if saved))

    def _forward_readers(self, name: str) -> Iterable[str]:
        """Through views."""
        for reader in self.view.readers.get(name, ()):
            if not self.graph.operations[reader].backward:
                yield reader
                if self.roots[reader] != reader:
                    yield from self._forward_readers(reader)

    def _key(self, source: str, each: Instance) -> Key:
        """The run of `source` that this instance reads: of its own layer, of the layer before, else the latest."""
        root = self.roots.get(source, source)
        if (root, each.layer) in self.values:
            return root, each.layer
        before = self.carries.get(root)
        if before is not None and each.layer and (before, each.layer - 1) in self.values:
            return before, each.layer - 1
        return self.latest.get(root, (root, 0))

    def _copy_key(self, value: str, each: Instance, placements: Iterable[str]) -> tuple:
        return value, self._key(value, each)[1], tuple(placements)

    def _read(self, source: str, each: Instance, placements: Iterable[str], phase: str, index: int | None, heavy: bool) -> None:
        key = self._key(source, each)
        value = self.copies.get(self._copy_key(source, each, placements)) or self.values.get(key)
        if value is None or index is None:
            return
        made = self.graph.operations.get(key[0])
        if phase == "forward" or (made is not None and made.backward):
            value.forward_last = index
            return
        value.needed_last = index
        if heavy or value.kept:
            value.backward_first = index if value.backward_first is None else value.backward_first
            value.backward_last = index

    def _need(self, key: Key, index: int) -> None:
        value = self.values.get(key)
        if value is None:
            return
        value.needed_last = index if value.needed_last is None else max(value.needed_last, index)

    def _close(self, value: _Value) -> None:
        last = value.forward_last
        if value.kept:
            later = [i for i in (last, value.backward_last, value.needed_last) if i is not None]
            self.ledger.add(value.kept, value.born, max(later, default=None), value.late)
        self.ledger.add(value.dropped, value.born, last, value.late)
        if value.backward_first is not None and value.backward_first != last:
            self.ledger.add(value.dropped, value.backward_first, value.backward_last)

    def _gradient(self, each: Instance, index: int | None) -> None:
        """A gradient lives until the optimizer has read it; what it takes beyond its reduced part, until it is reduced."""
        key = (each.name, each.layer)
        if key in self.gradient_bytes:
            self.gradient_bytes[key].last = index  # a further microbatch adds to it
            return
        nbytes = float(sum(self.graph.operations[each.name].result_bytes))
        moves = [m for m in self.graph.redistributions if m.consumer == "" and self.roots.get(m.value) == each.name]
        kept = min([nbytes, *(placed_bytes(m.shape, m.dtype, m.target, self.graph.mesh) for m in moves)])
        self.ledger.add(kept, index, None)
        self.ledger.gradient_bytes += kept
        if nbytes > kept:
            self.gradient_bytes[key] = Interval(nbytes - kept, index, index)
            self.ledger.intervals.append(self.gradient_bytes[key])
        else:
            self.gradient_bytes[key] = Interval(0.0, index, index)


def _carries(graph: GraphPlan) -> dict[str, str]:
    """What the listed layer reads from outside -> what the layers above it read instead: the result of the layer before.
    Matched by phase, block and bytes."""
    outputs: dict[tuple, str] = {}
    inputs: dict[tuple, str] = {}
    for reader in graph.operations.values():
        for source in reader.sources:
            made = graph.operations.get(source)
            if made is None or made.block == reader.block or made.backward != reader.backward:
                continue
            if graph.runs(made) > 1 and graph.runs(reader) == 1:
                outputs.setdefault((made.block, made.backward, made.result_bytes), source)
            if graph.runs(made) == 1 and graph.runs(reader) > 1:
                inputs.setdefault((reader.block, reader.backward, made.result_bytes), source)
    found: dict[str, str] = defaultdict(str)
    for key, source in inputs.items():
        if key in outputs:
            found[source] = outputs[key]
    return dict(found)
