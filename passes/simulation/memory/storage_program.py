"""A joint graph as what is kept for backward needs it: runs in order, and the storages that they read and make.

A storage is a stretch of memory, however many views look at it. Views are no runs: who reads one reads its storage.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """One call of an operator.

    backward: whether it is part of backward; if not, it can run in forward, or once more in backward where it is
    `repeatable`, which is to say that it gives the same again. us: what that takes. reads, makes: storages, each once.
    inlined: whether a compiler that fuses computes it in the kernels of whoever reads it, so that its result takes no
    memory where all of these are `fusing`. costly: whether such a compiler would rather write down what is computed with it
    than compute it in several kernels. block: where it is from. workspace_bytes: of a collective, besides what it reads
    and makes, until it is waited for. waits_for: the run that this one waits for, and nothing else. scratch_bytes: of any run,
    besides, while it runs.
    """

    name: str
    backward: bool
    us: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    repeatable: bool = True
    inlined: bool = False
    fusing: bool = False
    costly: bool = False
    block: str = ""
    workspace_bytes: int = 0
    waits_for: int | None = None
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """name: of the node that has it first, which is what is kept; "" of a result that nobody reads. nbytes: of one rank.
    maker: number of the run that makes it; None for what a graph is given. given: "" or, of what a graph is given, "forward"
    (parameters, a batch: there all the time) or "backward" (tangents). save_us: what writing it in forward and reading it in
    backward takes; offload_us: moving it out of the device's memory and back, infinite where that cannot be. said: what the
    script said of it by activation checkpointing, nothing, "keep" or "again"."""

    name: str
    nbytes: int
    maker: int | None
    given: str = ""
    save_us: float = 0.0
    offload_us: float = math.inf
    said: str = ""


@dataclass(frozen=True, slots=True)
class FoldedLayer:
    """A layer on a tape that stands for several equal ones, one after another. block: its path; layers: how many. forward,
    backward: the first of its runs in each phase, and the first that follows."""

    block: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    layers: int

    @property
    def runs(self) -> tuple[int, ...]:
        return *range(*self.forward), *range(*self.backward)


@dataclass(frozen=True)
class StorageProgram:
    """runs: in the order of the graph. returned: storages that forward hands out, which its caller may hold until backward
    is over; gradients: that backward hands out, held until the step ends. between_bytes: that others take between forward and
    backward; after_bytes: while the gradients are used. stand_ins: layers that stand for several
    (`passes.checkpointing.layer_folding`), two neighbors of each list of layers after another. early: runs of a layer that are
    part of the one before, and the place among `stand_ins` of the layer that they are for, None if that stands for itself."""

    runs: tuple[ProgramOp, ...]
    storages: tuple[Storage, ...]
    returned: frozenset[int]
    gradients: frozenset[int]
    between_bytes: int = 0
    after_bytes: int = 0
    stand_ins: tuple[FoldedLayer, ...] = ()
    early: tuple[tuple[int, int | None], ...] = ()

    @cached_property
    def stand_in_of(self) -> tuple[FoldedLayer | None, ...]:
        """Of each run, the layer that it is part of, where that stands for several."""
        found: list[FoldedLayer | None] = [None] * len(self.runs)
        for stand_in in self.stand_ins:
            for run in stand_in.runs:
                found[run] = stand_in
        return tuple(found)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Of each run, how often the model has it."""
        return tuple(1 if stand_in is None else stand_in.layers for stand_in in self.stand_in_of)

    @cached_property
    def layers_again(self) -> tuple[int, ...]:
        """Of each run, how often the model has it once more where it is run once more: in the backward of its own layer."""
        found = list(self.layers)
        for run, place in self.early:
            found[run] = 1 if place is None else self.stand_ins[place].layers
        return tuple(found)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """Of each storage, how often the model has it."""
        return tuple(1 if storage.maker is None else self.layers[storage.maker] for storage in self.storages)

    @cached_property
    def for_all_layers(self) -> frozenset[int]:
        """What forward makes and layers read that stand for several, one for all, as a mask; or what it is computed from."""
        outside = {s for s in range(len(self.storages)) if self.is_forward(s) and self.stand_in_of[self.maker(s)] is None}
        found: set[int] = set()
        for one, other in zip(self.stand_ins[::2], self.stand_ins[1::2]):
            read_by = [{s for run in each.runs for s in self.runs[run].reads} for each in (one, other)]
            found |= outside.intersection(*read_by)
        stack = list(found)
        while stack:
            run = self.runs[self.maker(stack.pop())]
            more = outside.intersection(run.reads) - found if run.inlined else set()
            found |= more
            stack += more
        return frozenset(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Of each storage, the runs that read it, in order."""
        found: list[list[int]] = [[] for _ in self.storages]
        for index, run in enumerate(self.runs):
            for storage in run.reads:
                found[storage].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def touches(self) -> tuple[tuple[int, ...], ...]:
        """Of each run, what it reads and makes."""
        return tuple((*run.reads, *run.makes) for run in self.runs)

    @cached_property
    def given_for_backward(self) -> tuple[int, ...]:
        return tuple(s for s, storage in enumerate(self.storages) if storage.given == "backward")

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Storages that forward can make and backward wants, itself or to compute others again."""
        wanted: set[int] = set()
        for run in reversed(self.runs):
            if run.backward or wanted.intersection(run.makes):
                wanted.update(run.reads)
        return tuple(s for s in sorted(wanted) if self.is_forward(s))

    def is_forward(self, storage: int) -> bool:
        """Whether a run of forward makes it."""
        maker = self.storages[storage].maker
        return maker is not None and not self.runs[maker].backward

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Candidates that backward itself reads."""
        return frozenset(s for run in self.runs if run.backward for s in run.reads).intersection(self.candidates)

    @cached_property
    def bound_to_keep(self) -> frozenset[int]:
        """What backward reads and nothing can make again, such as random numbers. (Others of the kind are kept where what
        backward reads is made of them again.)"""
        return frozenset(s for s in self.wanted if not self.repeatable(s))

    @cached_property
    def never_kept(self) -> frozenset[int]:
        """Candidates of which the script says that they are made again, where that can be."""
        return frozenset(s for s in self.candidates if self.storages[s].said == "again" and self.repeatable(s))

    def repeatable(self, storage: int) -> bool:
        """Whether the run that makes it gives the same again; to what the script says is kept, that does not happen."""
        return self.runs[self.maker(storage)].repeatable and self.storages[storage].said != "keep"

    @cached_property
    def offloadable(self) -> frozenset[int]:
        """Candidates that can be elsewhere between forward and backward: not what the caller of forward holds."""
        finite = frozenset(s for s in self.candidates if math.isfinite(self.storages[s].offload_us))
        return finite - self.returned - self.never_kept

    def maker(self, storage: int) -> int:
        maker = self.storages[storage].maker
        assert maker is not None, f"{self.storages[storage].name} is given"
        return maker

    def bytes_of(self, storages: Sequence[int] | frozenset[int]) -> int:
        """Of all layers."""
        return sum(self.storages[s].nbytes * self.copies[s] for s in storages)

    def us_of(self, run: int) -> float:
        """What running it once more takes in all layers."""
        return self.runs[run].us * self.layers_again[run]

    def save_us_of(self, storage: int) -> float:
        return self.storages[storage].save_us * self.copies[storage]

    def offload_us_of(self, storage: int) -> float:
        return self.storages[storage].offload_us * self.copies[storage]
