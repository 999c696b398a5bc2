"""Step graph: one rank's calls in order, values redistributed between them, and constant bytes, in plain numbers.

`hpml_compiler.simulate.plan_step_graph` builds one from a plan.
All times and bytes are of one rank, and of one microbatch where there are several.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from passes.graph.step_phase import BACKWARD, Phase

When = Literal["before", "loop", "after"]


@dataclass(frozen=True, slots=True)
class StepCall:
    """One operation.

    reads: each value read (name of a call or of a graph input) with the layout in which it is read.
    result_bytes: of each result; saved: True for results that are saved for backward. view_of: the value whose storage
    the results share, if they are views. scratch_bytes: temporary memory of the call on a CPU.
    block: its path, such as `h.3`; kernel: kernel kind. inlined, fusing, costly: how the compiler fuses it, as in
    `passes.simulation.memory.storage_program.ProgramOp`.
    gradient: the optimizer reads its results, or views of them, so they stay in memory until the step ends.
    runs: number of runs in a step of the whole model, where one listed layer stands for many. again_us: time of recomputing it
    in backward, where its results are not saved. offload_us: time of moving its results out of the device's memory in forward
    and back for backward. when: in the loop over microbatches, or once, before it or after it.
    """

    name: str
    phase: Phase
    block: str
    us: float
    reads: tuple[tuple[str, Hashable], ...] = ()
    result_bytes: tuple[float, ...] = ()
    saved: tuple[bool, ...] = ()
    view_of: str | None = None
    scratch_bytes: float = 0.0
    kernel: str = "pointwise"
    inlined: bool = False
    fusing: bool = False
    costly: bool = False
    gradient: bool = False
    runs: int = 1
    again_us: float | None = None
    offload_us: float = 0.0
    when: When = "loop"

    @property
    def bytes(self) -> float:
        return float(sum(self.result_bytes))

    @property
    def saved_bytes(self) -> float:
        return float(sum(b for b, saved in zip(self.result_bytes, self.saved) if saved))


@dataclass(frozen=True, slots=True)
class TransferHop:
    """One collective over one mesh axis; without bytes a local step, such as a slice. link_j: joules on the links. ranks: size
    of the axis, 1 if unknown."""

    collective: str
    axis: str
    bytes: float
    us: float
    link_j: float = 0.0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """A paid part of a redistribution: a value goes from one layout to another for `reader`, which is a
    call, its own producer (a sum reduced where it is computed), or "" for a graph output. gradient: it is reduced
    for the optimizer. result_bytes: of the value in its target layout, where a microbatch allocates and frees it. once: it
    runs once a step, however many microbatches; each: a gradient is reduced in each of them, not after the last. It stands for
    `multiplicity` equal ones in the whole model."""

    value: str
    reader: str
    source: Hashable
    target: Hashable
    hops: tuple[TransferHop, ...]
    result_bytes: float
    dtype: str = "float32"
    gradient: bool = False
    multiplicity: int = 1
    once: bool = False
    each: bool = False

    @property
    def communicates(self) -> bool:
        return any(hop.bytes for hop in self.hops)

    def runs(self, microbatches: int) -> int:
        """Number of runs in a step."""
        return 1 if self.once or self.gradient and not self.each else microbatches


@dataclass(frozen=True)
class StepGraph:
    """One graph of a step. All calls of forward come before those of backward.

    tangents: bytes of the gradients that backward receives. parameter_bytes, gradient_bytes, optimizer_bytes: per
    rank. call_us: overhead of entering forward, or backward; accumulate_us: accumulating the gradients of one more microbatch;
    optimizer_us: the optimizer's step. again_us: recomputation for each layer of a class of blocks ("" outside of them) besides
    that of the listed calls, as where one listed layer stands for several that recompute different calls.

    microbatches: how often this graph runs in a step, if it has a loop of its own. at_once: backward of each microbatch follows
    its forward; otherwise all forwards come first.
    """

    name: str
    training: bool
    calls: tuple[StepCall, ...]
    legs: tuple[Transfer, ...] = ()
    tangents: Mapping[str, float] = field(default_factory=dict)
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    call_us: float = 0.0
    accumulate_us: float = 0.0
    optimizer_us: float = 0.0
    again_us: Mapping[str, float] = field(default_factory=dict)
    microbatches: int = 1
    at_once: bool = True

    @cached_property
    def by_name(self) -> dict[str, StepCall]:
        return {call.name: call for call in self.calls}

    @cached_property
    def readers(self) -> dict[str, list[StepCall]]:
        """Calls that read each value."""
        found: dict[str, list[StepCall]] = defaultdict(list)
        for call in self.calls:
            for value in dict.fromkeys(value for value, _ in call.reads):
                found[value].append(call)
        return found


def storage_of(value: str, calls: Mapping[str, StepCall]) -> str:
    """The value that owns the storage of `value`: itself, or the root of its chain of views."""
    while value in calls and (seen_in := calls[value].view_of) is not None:
        value = seen_in
    return value


def returned_gradients(calls: Sequence[StepCall]) -> frozenset[str]:
    """Backward results without readers, or read only by views without readers: gradients of parameters."""
    readers: dict[str, list[StepCall]] = defaultdict(list)
    for call in calls:
        for value, _ in call.reads:
            readers[value].append(call)
    found: set[str] = set()
    for call in reversed(calls):
        if call.phase == BACKWARD and all(r.name in found and r.view_of is not None for r in readers[call.name]):
            found.add(call.name)
    return frozenset(found)


def with_gradients(calls: Sequence[StepCall]) -> tuple[StepCall, ...]:
    """The calls, with those that produce the optimizer's gradients marked."""
    by_name = {call.name: call for call in calls}
    storages = {storage_of(name, by_name) for name in returned_gradients(calls)}
    return tuple(replace(call, gradient=call.phase == BACKWARD and call.name in storages) for call in calls)
