"""Program of one rank: tasks of its two streams in a step, in order.

Compute runs in the order of the graph. A redistribution is issued when its value is ready and waited for by its first
reader; one whose value is a parameter or comes from an earlier phase (a gather of weights, redistribution of a saved value)
is prefetched one block ahead: it may start as soon as the block before its reader's does, as FSDP prefetches (Zhao et al.,
"PyTorch FSDP", VLDB 2023, section 3.3.2). Reductions of gradients are collected into buckets (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2), run beside the rest of backward, and are waited for by the optimizer.

`lower_step` interleaves the graphs of a step; `step_lowering` lowers one of them into a `RankProgram`.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from passes.graph.step_phase import BACKWARD, FORWARD
from passes.simulation.event_simulator import COMMUNICATION, COMPUTE, StreamTask

RECOMPUTE, OFFLOAD, OPTIMIZER = "recompute", "offload", "optimizer"


@dataclass(slots=True)
class ProgramEntry:
    """A task of a rank. kind: the phase, or the name of the collective; `slice` is a local step on the compute stream.
    kernel: kernel kind, for its power; link_j: joules on the links, per rank."""

    stream: int
    name: str
    kind: str
    us: float
    after: list[int] = field(default_factory=list)
    kernel: str = "pointwise"
    link_j: float = 0.0

    @property
    def is_work(self) -> bool:
        """True for the model's arithmetic, copies of offloaded values and the optimizer, False for parts of communication."""
        return self.kind in (FORWARD, RECOMPUTE, OFFLOAD, BACKWARD, OPTIMIZER)


class RankProgram:
    """Entries of one step in the order in which they are issued."""

    def __init__(self) -> None:
        self.entries: list[ProgramEntry] = []
        self._compute: int | None = None  # the last entry of the compute stream
        self._segments: list[tuple[object, int | None]] = []  # (block instance, last compute entry before it)
        self._pending: list[int] = []

    def compute(self, name: str, kind: str, us: float, waits: Iterable[int] = (), kernel: str = "pointwise") -> int | None:
        """Append to the compute stream. Work that takes no time and waits for nothing gets no entry: returns the index of
        the entry before it (None at the very start)."""
        self._pending += waits
        if not us and not self._pending:
            return self._compute
        after = [] if self._compute is None else [self._compute]
        self._compute = self._append(ProgramEntry(COMPUTE, name, kind, us, [*after, *self._pending], kernel))
        self._pending = []
        return self._compute

    def communicate(self, name: str, kind: str, us: float, after: Iterable[int | None], link_j: float = 0.0) -> int:
        before = [each for each in after if each is not None]
        return self._append(ProgramEntry(COMMUNICATION, name, kind, us, before, "", link_j))

    def wait(self, index: int | None) -> None:
        """Make the next entry of the compute stream wait for that one, if it is a collective."""
        self._pending += self.collective(index)

    def collective(self, index: int | None) -> list[int]:
        """The index if it is that of a collective: the compute stream is in order, so its entries need no wait."""
        return [index] if index is not None and self.entries[index].stream == COMMUNICATION else []

    def enter(self, block: object) -> None:
        """Attribute the following compute entries to this run of a block."""
        if not self._segments or self._segments[-1][0] != block:
            self._segments.append((block, self._compute))

    def prefetch_after(self) -> int | None:
        """The entry after which the previous block starts; blocks that take no time do not count."""
        own = self._segments[-1][1]
        return next((before for _, before in reversed(self._segments) if before != own), None)

    def optimizer(self, us: float) -> None:
        """Append the optimizer: it waits for everything not waited for yet."""
        read = {before for entry in self.entries for before in entry.after}
        waits = [i for i, entry in enumerate(self.entries) if entry.stream == COMMUNICATION and i not in read]
        self.compute("optimizer" if us else "end", OPTIMIZER, us, [*waits, *self._pending])

    def tasks(self, overlap: bool) -> list[StreamTask]:
        """Tasks with their index as priority, so that of two ready collectives the one needed first starts. Without
        overlap they run one after another."""
        if overlap:
            return [StreamTask(e.us, e.stream, tuple(e.after), priority=i) for i, e in enumerate(self.entries)]
        return [StreamTask(e.us, e.stream, (i - 1,) if i else ()) for i, e in enumerate(self.entries)]

    def _append(self, entry: ProgramEntry) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1
