"""Storage program: a joint graph as ops in order, with the storages that they read and write.

A storage is one allocation, with any number of views. Views are not ops: their readers read the storage.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """One call of an operator.

    backward: True for ops of backward; others can run in forward, or be recomputed in backward if they are
    `repeatable`, that is, if they give the same result again. us: time of that. reads, makes: storages, each once.
    inlined: True if a fusing compiler computes it in the kernels of its readers, so that its result takes no
    memory if all of these are `fusing`. costly: True if such a compiler would rather materialize results computed with it
    than compute them in several kernels. block: its path. workspace_bytes: of a collective, besides its operands
    and results, until its wait or, where it `lingers`, until another collective has allocated its own. waits_for: the op that
    this one only waits for. scratch_bytes: temporary memory of any op while it runs. multiplies_activations: a batched
    product without parameters, as in attention. of_backward: part of backward by its tag, although it needs no gradient.
    draws: random numbers or seeds, also where nothing reads them. seeded: random numbers that are computed from a seed.
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
    lingers: bool = False
    waits_for: int | None = None
    scratch_bytes: int = 0
    multiplies_activations: bool = False
    of_backward: bool = False
    draws: bool = False
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """name: of the node that writes it, by which it is saved; "" for a result without readers. nbytes: of one rank.
    maker: index of the op that writes it; None for inputs. input_phase: "" or, for inputs, "forward"
    (parameters, a batch: in memory all the time) or "backward" (tangents). save_us: time of writing it in forward and reading
    it in backward; offload_us: of moving it out of the device's memory and back, infinite if that is impossible. pinned:
    by the script's own activation checkpointing or by options: nothing, "keep" or "again". gathered: a copy of an input in
    another layout, such as an unsharded parameter."""

    name: str
    nbytes: int
    maker: int | None
    input_phase: str = ""
    save_us: float = 0.0
    offload_us: float = math.inf
    pinned: str = ""
    gathered: bool = False


@dataclass(frozen=True, slots=True)
class FoldedLayer:
    """A folded layer of a program: it stands for several equal ones, one after another. block: its path; layers: how many.
    forward, backward: its first op in each phase, and the first op after it."""

    block: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    layers: int

    @property
    def runs(self) -> tuple[int, ...]:
        return *range(*self.forward), *range(*self.backward)


class OtherMicrobatches(NamedTuple):
    """Memory of other microbatches at one moment. in_flight: how many are between their forward and their backward, each with
    the values in memory that it saves of this program. saved_bytes: saved of other programs, or received. gradient_bytes:
    accumulated gradients."""

    in_flight: int = 0
    saved_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Memory of the other microbatches while one runs the program. forward, backward: the different moments of a step at which
    one runs its forward, or its backward."""

    forward: tuple[OtherMicrobatches, ...] = (OtherMicrobatches(),)
    backward: tuple[OtherMicrobatches, ...] = (OtherMicrobatches(),)

    @staticmethod
    def of_loop(count: int, gradient_bytes: int, at_once: bool) -> Microbatches:
        """Of a loop over `count` microbatches. at_once: backward of each microbatch follows its forward; otherwise all forwards
        run first, and fewer microbatches are in flight with each backward."""
        if at_once:
            alone = OtherMicrobatches(gradient_bytes=gradient_bytes)
            return Microbatches((alone,), (alone,))
        first, second = OtherMicrobatches(count - 1), OtherMicrobatches(max(count - 2, 0), 0, gradient_bytes)
        return Microbatches((first,), (first, second))

    @property
    def in_flight(self) -> int:
        """Most microbatches between their forward and their backward, this one included."""
        return 1 + max(each.in_flight for each in (*self.forward, *self.backward))

    def others(self, backward: bool, kept_bytes: int) -> OtherMicrobatches:
        """The moment of forward, or of backward, at which most is in memory. kept_bytes: saved by one microbatch."""
        return max(self.backward if backward else self.forward,
                   key=lambda each: each.in_flight * kept_bytes + each.saved_bytes + each.gradient_bytes)


@dataclass(frozen=True)
class StorageProgram:
    """runs: in the order of the graph. returned: storages of forward's outputs, which its caller may hold until backward
    ends; gradients: backward's outputs, held until the step ends. between_bytes: other users' bytes between forward and
    backward; after_bytes: while the gradients are used. stand_ins: folded layers
    (`passes.checkpointing.layers.layer_folding`), two neighbors for each list of layers. early: ops of a layer that run
    during the previous one, and the index among `stand_ins` of their layer, None if that is not folded."""

    runs: tuple[ProgramOp, ...]
    storages: tuple[Storage, ...]
    returned: frozenset[int]
    gradients: frozenset[int]
    between_bytes: int = 0
    after_bytes: int = 0
    stand_ins: tuple[FoldedLayer, ...] = ()
    early: tuple[tuple[int, int | None], ...] = ()
    microbatches: Microbatches = Microbatches()

    @cached_property
    def stand_in_of(self) -> tuple[FoldedLayer | None, ...]:
        """For each op, its folded layer, if any."""
        found: list[FoldedLayer | None] = [None] * len(self.runs)
        for stand_in in self.stand_ins:
            for run in stand_in.runs:
                found[run] = stand_in
        return tuple(found)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """For each op, how often the model has it."""
        return tuple(1 if stand_in is None else stand_in.layers for stand_in in self.stand_in_of)

    @cached_property
    def layers_again(self) -> tuple[int, ...]:
        """For each op, how often it is recomputed in the model if it is recomputed: in the backward of its own layer."""
        found = list(self.layers)
        for run, place in self.early:
            found[run] = 1 if place is None else self.stand_ins[place].layers
        return tuple(found)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """For each storage, how often the model has it."""
        return tuple(1 if storage.maker is None else self.layers[storage.maker] for storage in self.storages)

    @cached_property
    def for_all_layers(self) -> frozenset[int]:
        """Forward storages that all folded layers share, such as a mask; and the storages that they are computed from."""
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
        """For each storage, the ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.storages]
        for index, run in enumerate(self.runs):
            for storage in run.reads:
                found[storage].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def touches(self) -> tuple[tuple[int, ...], ...]:
        """For each op, its operands and results."""
        return tuple((*run.reads, *run.makes) for run in self.runs)

    @cached_property
    def given_for_backward(self) -> tuple[int, ...]:
        return tuple(s for s, storage in enumerate(self.storages) if storage.input_phase == "backward")

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Storages that forward can write and backward needs, directly or for recomputation."""
        wanted: set[int] = set()
        for run in reversed(self.runs):
            if run.backward or wanted.intersection(run.makes):
                wanted.update(run.reads)
        return tuple(s for s in sorted(wanted) if self.is_forward(s))

    def is_forward(self, storage: int) -> bool:
        """True if a forward op writes it."""
        maker = self.storages[storage].maker
        return maker is not None and not self.runs[maker].backward

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Candidates that backward itself reads."""
        return frozenset(s for run in self.runs if run.backward for s in run.reads).intersection(self.candidates)

    @cached_property
    def bound_to_keep(self) -> frozenset[int]:
        """Storages that backward reads and nothing can recompute, such as random numbers. (Others of the kind are saved if
        recomputation needs them.)"""
        return frozenset(s for s in self.wanted if not self.repeatable(s))

    @cached_property
    def never_saved(self) -> frozenset[int]:
        """Candidates that the script's own checkpointing recomputes, where possible."""
        return frozenset(s for s in self.candidates if self.storages[s].pinned == "again" and self.repeatable(s))

    def repeatable(self, storage: int) -> bool:
        """True if its op gives the same result again, and the script does not require it to be saved."""
        return self.runs[self.maker(storage)].repeatable and self.storages[storage].pinned != "keep"

    @cached_property
    def offloadable(self) -> frozenset[int]:
        """Candidates that can be offloaded between forward and backward: not those that the caller of forward holds."""
        finite = frozenset(s for s in self.candidates if math.isfinite(self.storages[s].offload_us))
        return finite - self.returned - self.never_saved

    def maker(self, storage: int) -> int:
        maker = self.storages[storage].maker
        assert maker is not None, f"{self.storages[storage].name} is given"
        return maker

    def bytes_of(self, storages: Sequence[int] | frozenset[int]) -> int:
        """Bytes over all layers."""
        return sum(self.storages[s].nbytes * self.copies[s] for s in storages)

    def us_of(self, run: int) -> float:
        """Time of recomputing it in all layers."""
        return self.runs[run].us * self.layers_again[run]

    def save_us_of(self, storage: int) -> float:
        return self.storages[storage].save_us * self.copies[storage]

    def offload_us_of(self, storage: int) -> float:
        return self.storages[storage].offload_us * self.copies[storage]
