"""The program of one lane: what its two streams do in a step, in order, and which bytes live from when to when.

Compute runs in the order of the graph. A redistribution is issued when its value is there and waited for by its first
reader; one that a parameter or an earlier phase supplies (a gather of weights, a saved value brought to another placement)
is prefetched one block ahead: it may start as soon as the block before its reader's does, as FSDP prefetches (Zhao et al.,
"PyTorch FSDP", VLDB 2023, section 3.3.2). Reductions of gradients are collected into buckets (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2), run beside the rest of backward, and are waited for by the optimizer.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpml_compiler.plans.schema import GraphPlan, Redistribution
from hpml_compiler.simulate.engine import COMMUNICATION, COMPUTE
from hpml_compiler.simulate.liveness import Ledger
from hpml_compiler.simulate.local import REDUCING, LocalView
from hpml_compiler.simulate.prices import PlanPrices
from hpml_compiler.simulate.unroll import OUTSIDE, Group, Instance, unroll
from passes.costs.base import BUCKET_BYTES

FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = "forward", "recompute", "backward", "optimizer"


@dataclass(slots=True)
class Entry:
    """A task of a lane. kind: the phase, or the name of the collective; `slice` is a local step on the compute stream.
    kernel: the sort of kernel, for its power; link_j: joules that the links take of one rank."""

    stream: int
    name: str
    kind: str
    us: float
    after: list[int] = field(default_factory=list)
    kernel: str = "pointwise"
    link_j: float = 0.0

    @property
    def is_work(self) -> bool:
        """Whether this is the model's arithmetic or the optimizer's, not a part of communication."""
        return self.kind in (FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER)


@dataclass
class _Bucket:
    """Gradients of one kind that are reduced together."""

    us: float = 0.0
    nbytes: float = 0.0
    link_j: float = 0.0
    after: list[int] = field(default_factory=list)
    members: list[tuple[Redistribution, int, int, str]] = field(default_factory=list)


class Program:
    """Entries of one step. prices: of each graph; microbatches: how often forward and backward run."""

    def __init__(self, graphs: Sequence[GraphPlan], prices: Sequence[PlanPrices], *, microbatches: int, recompute: bool):
        self.entries: list[Entry] = []
        self.ledger = Ledger()
        self._compute: int | None = None  # the last entry of the compute stream
        self._segments: list[tuple[object, int | None]] = []  # (block instance, last compute entry before it)
        self._pending: list[int] = []
        walks = [_Walk(self, graph, each, 1.0 / microbatches, recompute) for graph, each in zip(graphs, prices)]
        for microbatch in range(microbatches):
            for walk in walks:
                walk.forward(microbatch)
            for walk in reversed(walks):
                walk.backward(microbatch, last=microbatch == microbatches - 1)
        for walk in walks:
            walk.close()
        self._optimizer(sum(each.optimizer_us() for each in prices))

    def compute(self, name: str, kind: str, us: float, waits: Iterable[int] = (), kernel: str = "pointwise") -> int | None:
        """Append to the compute stream. What takes no time and waits for nothing is no entry of its own: the index of
        the entry before it stands for it (None at the very start)."""
        self._pending += waits
        if not us and not self._pending:
            return self._compute
        after = [] if self._compute is None else [self._compute]
        self._compute = self._append(Entry(COMPUTE, name, kind, us, [*after, *self._pending], kernel))
        self._pending = []
        return self._compute

    def communicate(self, name: str, kind: str, us: float, after: Iterable[int | None], link_j: float = 0.0) -> int:
        before = [each for each in after if each is not None]
        return self._append(Entry(COMMUNICATION, name, kind, us, before, "", link_j))

    def wait(self, index: int | None) -> None:
        """The next entry of the compute stream waits for that one, if it is a collective."""
        self._pending += self.collective(index)

    def collective(self, index: int | None) -> list[int]:
        """The index if it is that of a collective: what compute does is waited for by what follows it anyway."""
        return [index] if index is not None and self.entries[index].stream == COMMUNICATION else []

    @property
    def now(self) -> int | None:
        """The last entry of the compute stream so far."""
        return self._compute

    def enter(self, block: object) -> None:
        """What follows on the compute stream belongs to this run of a block."""
        if not self._segments or self._segments[-1][0] != block:
            self._segments.append((block, self._compute))

    def prefetch_after(self) -> int | None:
        """The entry after which the block before the present one starts; blocks that take no time do not count."""
        own = self._segments[-1][1]
        return next((before for _, before in reversed(self._segments) if before != own), None)

    def _append(self, entry: Entry) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1

    def _optimizer(self, us: float) -> None:
        read = {before for entry in self.entries for before in entry.after}
        waits = [i for i, entry in enumerate(self.entries) if entry.stream == COMMUNICATION and i not in read]
        self.compute("optimizer" if us else "end", OPTIMIZER, us, [*waits, *self._pending])


class _Walk:
    """One graph's part of the program."""

    def __init__(self, program: Program, graph: GraphPlan, prices: PlanPrices, part: float, recompute: bool):
        self.program, self.graph, self.prices, self.part = program, graph, prices, part
        self.view = LocalView(graph)
        self.phases = unroll(graph)
        self.moves = _Moves(graph, self.view)
        self.memory = program.ledger.of_graph(graph, self.view, part)
        self.recomputed: dict[Group, list[Instance]] = defaultdict(list)
        if recompute:
            blocks = [each for each in self.phases[0] if each.group != OUTSIDE]
            for each in blocks or self.phases[0]:
                self.recomputed[each.group if blocks else OUTSIDE].append(each)
        self.memory.recomputed = frozenset(self.recomputed)
        self.buckets: dict[tuple, _Bucket] = {}
        self.microbatch = 0
        self.returned: list[int | None] = []  # ends of the moves of what forward returns
        self.entry: int | None = None  # that of the last operation,
        self.kernel: tuple[str, int] = ("", 0)  # and of the kernel that it stands for: class and layer

    def forward(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.made: dict[tuple[str, int], int | None] = {}
        self.latest: dict[str, int | None] = {}
        self.memory.begin()
        self.program.compute(f"call {self.graph.name}", FORWARD, self.prices.call_us())
        self._run(self.phases[0], FORWARD)
        for index in self.returned:
            self.program.wait(index)
        self.returned.clear()

    def backward(self, microbatch: int, last: bool) -> None:
        """last: gradients are reduced, since no further microbatch adds to them."""
        self.microbatch = microbatch
        if self.graph.training:
            self.program.compute(f"call {self.graph.name}", BACKWARD, self.prices.call_us())
            self.memory.backward_begins(self.program.now)
        waiting = dict(self.recomputed) if self.phases[1] else {}
        for each in self.phases[1]:
            group = each.group if each.group in waiting else OUTSIDE if OUTSIDE in waiting else None
            if group is not None:
                self._run(waiting.pop(group), RECOMPUTE)
            self._run_one(each, BACKWARD, last)
        if microbatch and self.phases[1]:
            self.program.compute("accumulate gradients", BACKWARD, self.prices.accumulate_us())
        for index in self.returned:
            self.program.wait(index)
        self.returned.clear()
        if last:
            self._flush()
        self.memory.end(self.program.now)

    def close(self) -> None:
        """Moves that nothing in the graph waits for and no operation makes: the optimizer does."""
        for move in self.moves.loose:
            for _ in range(move.multiplicity):
                self._steps(move, move.value, [None])

    # --- one instance ---------------------------------------------------------------------------------------------

    def _run(self, instances: Sequence[Instance], phase: str) -> None:
        for each in instances:
            self._run_one(each, phase, False)

    def _run_one(self, each: Instance, phase: str, reduce: bool) -> None:
        program, label = self.program, self._label(each)
        program.enter((phase, each.group, self.microbatch) if each.group != OUTSIDE else (phase, self.microbatch))
        for move, repeats in self.moves.into(each):
            if move.value != each.name:
                self._move_in(move, repeats, each, phase)
        operation = self.graph.operations[each.name]
        for source in operation.sources:
            program.wait(self.made.get((source, each.layer), self.latest.get(source)))
        index = program.compute(label, phase, self.prices.operation_us(each.name, self.part), kernel=operation.kind)
        if self._fresh(index):
            self.kernel = operation.class_id, each.layer
        self.memory.operation(each, phase, index, late=self.kernel != (operation.class_id, each.layer))
        self._set_made(each, index)
        for move, repeats in self.moves.into(each):
            if move.value == each.name:  # a sum where it is made
                for _ in range(repeats):
                    index = self._steps(move, label, [index])
                self._set_made(each, index)
        for move, repeats in self.moves.out_of(each):
            for _ in range(repeats):
                if not self.view.is_gradient(move):
                    self._return(move, self._steps(move, label, [index]))
                elif reduce:
                    self._reduce(move, 0, index, each.layer, label)

    def _return(self, move: Redistribution, index: int | None) -> None:
        """What a phase returns is waited for when it ends, and stays with the caller until the microbatch does."""
        self.returned.append(index)
        self.memory.output(move, index)

    def _move_in(self, move: Redistribution, repeats: int, each: Instance, phase: str) -> None:
        """Before its reader; it starts where its value is there."""
        made_here = self.graph.operations.get(move.value)
        local = made_here is not None and made_here.backward == (phase == BACKWARD)
        ready = self.made.get((move.value, each.layer), self.latest.get(move.value)) if local else (
            self.program.prefetch_after())
        earlier = self.memory.copy_of(move, each)
        index: int | None = None
        for _ in range(repeats):
            index = self._steps(move, move.value + self._layer(each), [ready if index is None else index, earlier])
        if index is not None:
            self.memory.copy(move, each, phase, index)
            self.program.wait(index)

    def _steps(self, move: Redistribution, label: str, after: list[int | None], first: int = 0) -> int | None:
        """All steps from `first` on, one after another; local ones on the compute stream. The last entry's index."""
        index: int | None = None
        for step in move.steps[first:]:
            us = self.prices.step_us(move, step, self.part)
            before = after if index is None else [index]
            if step.bytes:
                index = self.program.communicate(label, step.collective, us, before, self.prices.link_j(move, step, self.part))
            else:
                index = self.program.compute(label, step.collective, us, [
                    each for b in before for each in self.program.collective(b)])
        return index

    def _fresh(self, index: int | None) -> bool:
        """Whether this is a new entry, not one that stands for an operation that takes no time."""
        fresh = index is not None and index != self.entry
        self.entry = index
        return fresh

    def _set_made(self, each: Instance, index: int | None) -> None:
        self.made[each.name, each.layer] = self.latest[each.name] = index

    def _layer(self, each: Instance) -> str:
        return f" [{each.layer}]" if each.runs > 1 else ""

    def _label(self, each: Instance) -> str:
        return each.name + self._layer(each)

    # --- gradients --------------------------------------------------------------------------------------------------

    def _reduce(self, move: Redistribution, k: int, ready: int | None, layer: int, label: str) -> None:
        """Put step k of a gradient's reduction into a bucket, or run it if it is none that buckets take."""
        if k == len(move.steps):
            self.memory.reduced(move, layer, ready)
            return
        step = move.steps[k]
        if step.collective not in REDUCING or not step.bytes:
            self.memory.reduced(move, layer, self._steps(move, label, [ready], k))
            return
        key = (k, step.collective, step.axis, move.dtype)
        bucket = self.buckets.setdefault(key, _Bucket())
        if bucket.members and bucket.nbytes + step.bytes > BUCKET_BYTES:
            self._close_bucket(key)
            bucket = self.buckets.setdefault(key, _Bucket())
        bucket.us += self.prices.step_us(move, step)
        bucket.nbytes += step.bytes
        bucket.link_j += self.prices.link_j(move, step)
        bucket.after += [] if ready is None else [ready]
        bucket.members.append((move, k, layer, label))

    def _close_bucket(self, key: tuple) -> None:
        bucket = self.buckets.pop(key)
        more = len(bucket.members) - 1
        label = bucket.members[0][3] + (f" and {more} more" if more else "")
        index = self.program.communicate(label, key[1], bucket.us, sorted(set(bucket.after)), bucket.link_j)
        if more:  # they are copied together
            self.program.ledger.add(bucket.nbytes, index, index)
        for move, k, layer, name in bucket.members:
            self._reduce(move, k + 1, index, layer, name)

    def _flush(self) -> None:
        while self.buckets:
            self._close_bucket(min(self.buckets))


class _Moves:
    """Which redistributions run at which instance, so that each runs as often as the plan says."""

    def __init__(self, graph: GraphPlan, view: LocalView):
        order = {name: k for k, name in enumerate(graph.operations)}
        self.graph, self.order = graph, order
        self._into: dict[str, list[Redistribution]] = defaultdict(list)
        self._out: dict[str, list[Redistribution]] = defaultdict(list)
        self.loose: list[Redistribution] = []
        for move in graph.redistributions:
            if move.consumer in order:
                self._into[move.consumer].append(move)
            elif move.value in order:
                self._out[move.value].append(move)
            else:
                self.loose.append(move)
        for moves in self._into.values():
            moves[:] = _chained(moves)

    def into(self, each: Instance) -> list[tuple[Redistribution, int]]:
        return [(move, n) for move in self._into.get(each.name, ()) if (n := self._repeats(move, each))]

    def out_of(self, each: Instance) -> list[tuple[Redistribution, int]]:
        return [(move, n) for move in self._out.get(each.name, ()) if (n := self._repeats(move, each))]

    def _repeats(self, move: Redistribution, each: Instance) -> int:
        """Of r equal moves and n runs of their reader: each run has r / n; where there are fewer moves, those runs
        have one that read what moves: the last ones, if it comes from the layer before, else the first."""
        whole, rest = divmod(move.multiplicity, each.runs)
        made = self.order.get(move.value, -1)
        made_before = made <= self.order[each.name]
        here = each.position < rest if made_before else each.position >= each.runs - rest
        return whole + here


def _chained(moves: list[Redistribution]) -> list[Redistribution]:
    """Moves of one reader such that one which starts where another of the same value ends comes after it."""
    found: list[Redistribution] = []
    rest = list(moves)
    while rest:
        free = next((m for m in rest if not any(
            o is not m and o.value == m.value and o.target == m.source for o in rest)), rest[0])
        rest.remove(free)
        found.append(free)
    return found
