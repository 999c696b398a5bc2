"""What one rank does in a step, in plain numbers: calls in order, values on their way between them, bytes held throughout.

`passes.sharding.oracle.decision_step_graph` makes one of a decision, `hpml_compiler.simulate.plan_step_graph` of a saved plan.
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

    reads: each value read (a call, by its name, or an input of the graph) with the layout in which it is read.
    result_bytes: of each result; saved: whether that result is held until backward. view_of: the value in whose storage
    the results are, so that they take none of their own. scratch_bytes: what the call takes besides, while it runs.
    block: where it is from, as `h.3`; kernel: the sort of kernel; fused: calls of one block, phase and `fused` are one
    kernel. gradient: the optimizer takes its results, or views of them, so that they are held until the step ends.
    runs: how often it runs in a step of the whole model, where one layer is listed for many. again_us: what running it once
    more takes, where backward does so because its results are not saved. when: in the loop over microbatches, or once, whole,
    before it or after it.
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
    fused: Hashable = None
    gradient: bool = False
    runs: int = 1
    again_us: float | None = None
    when: When = "loop"

    @property
    def bytes(self) -> float:
        return float(sum(self.result_bytes))

    @property
    def saved_bytes(self) -> float:
        return float(sum(b for b, saved in zip(self.result_bytes, self.saved) if saved))


@dataclass(frozen=True, slots=True)
class TransferHop:
    """One collective over one mesh axis; without bytes something local, such as a slice. link_j: joules that the links take."""

    collective: str
    axis: str
    bytes: float
    us: float
    link_j: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a redistribution that is paid for once: a value goes from one layout to another for `reader`, which is a
    call, the very call that makes it (a sum where it is made), or "" for what the graph returns. gradient: it is reduced
    for the optimizer. result_bytes: of the value in its target layout, where a microbatch makes and drops it. once: a step
    has it once, however many microbatches. It stands for `multiplicity` equal ones in the whole model."""

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

    @property
    def communicates(self) -> bool:
        return any(hop.bytes for hop in self.hops)


@dataclass(frozen=True)
class StepGraph:
    """One graph of a step. All calls of forward come before those of backward.

    tangents: bytes of the gradients that backward is given. parameter_bytes, gradient_bytes, optimizer_bytes: held by a
    rank; trained_bytes: of each trained parameter. call_us: what entering forward, or backward, takes by itself;
    accumulate_us: adding the gradients of one more microbatch; optimizer_us: the optimizer's step.

    microbatches: how often this graph runs in a step, where that is its own matter. at_once: backward of each of them follows
    its forward; else forward of all comes first.
    """

    name: str
    training: bool
    calls: tuple[StepCall, ...]
    legs: tuple[Transfer, ...] = ()
    tangents: Mapping[str, float] = field(default_factory=dict)
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    trained_bytes: tuple[float, ...] = ()
    call_us: float = 0.0
    accumulate_us: float = 0.0
    optimizer_us: float = 0.0
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
    """The value whose memory `value` is seen in: itself, or what a chain of views starts from."""
    while value in calls and (seen_in := calls[value].view_of) is not None:
        value = seen_in
    return value


def returned_gradients(calls: Sequence[StepCall]) -> frozenset[str]:
    """What backward makes and nobody reads, or only views that nobody reads: gradients of parameters."""
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
    """The calls, of which those are marked that make what the optimizer takes."""
    by_name = {call.name: call for call in calls}
    storages = {storage_of(name, by_name) for name in returned_gradients(calls)}
    return tuple(replace(call, gradient=call.phase == BACKWARD and call.name in storages) for call in calls)
