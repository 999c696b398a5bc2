"""Records of activation checkpointing: saved, offloaded and recomputed values of one graph, and its memory."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from hpml_compiler.plans.record_fields import Count, Microseconds, Names, Record


class SavedValue(Record):
    """An activation that is saved for backward. block: where it is computed. bytes: on one device, for one layer. layers:
    number of layers with such a value, where one block represents several; bytes and times are per layer."""

    block: str
    bytes: Count
    layers: int = 1


class OffloadedValue(SavedValue):
    """An activation that is offloaded between forward and backward. predicted_us: time to copy it out and back."""

    predicted_us: Microseconds


class RecomputedCall(Record):
    """A forward call that is recomputed in backward. block: where it is. predicted_us: time per layer, for `layers` layers."""

    block: str
    predicted_us: Microseconds
    layers: int = 1


class PeakRecord(Record):
    """Memory peak of forward or of backward of one graph. node, block: the node that runs at the peak and its block. again: the
    node is a forward node recomputed in backward. parts: bytes by part ("gradients", "saved", "recomputed", "transient")."""

    node: str
    block: str
    again: bool
    parts: dict[str, Count]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class PhaseMemory(Record):
    """Bytes by part over forward or backward of one graph, in the order of execution. nodes: the node that runs, wherever the
    bytes change; parts: for each part, the bytes while each of these runs. Empty in plans that are written by hand."""

    nodes: Names = ()
    parts: dict[str, Annotated[tuple[Count, ...], Field(strict=False)]] = Field(default_factory=dict)

    def moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Each node with the bytes by part while it runs."""
        for k, node in enumerate(self.nodes):
            yield node, {part: column[k] for part, column in self.parts.items() if column[k]}


class CheckpointingPlan(Record):
    """Activation checkpointing of one graph under a memory budget; or what a pipeline stage saves without one, as torch's
    partitioner chooses it: `budget_bytes` is None then, and recomputed values, which cost next to nothing, are left out. Names
    are those of the nodes that a rank runs; bytes are on one device and leave out parameters, optimizer state and inputs.
    `budget_bytes`: memory budget of a whole step; `saved_bytes`: activations between forward and backward; `gradient_bytes`:
    gradients until the optimizer has read them; `step_bytes`: memory of the optimizer step, parameters and state included, for
    the graphs known when this was decided; `ahead`: all-gathers of parameters are prefetched during the previous block;
    `saved`, `offloaded`, `again` (recomputed): by node; `forward`, `backward`: the memory peak of each; `forward_memory`,
    `backward_memory`: the bytes over each."""

    budget_bytes: Count | None = None
    saved_bytes: Count
    gradient_bytes: Count
    step_bytes: Count = 0
    ahead: bool = True
    saved: dict[str, SavedValue]
    offloaded: dict[str, OffloadedValue] = Field(default_factory=dict)
    again: dict[str, RecomputedCall]
    forward: PeakRecord
    backward: PeakRecord
    forward_memory: PhaseMemory = PhaseMemory()
    backward_memory: PhaseMemory = PhaseMemory()

    @property
    def again_us(self) -> float:
        return sum(call.predicted_us * call.layers for call in self.again.values())

    @property
    def offload_us(self) -> float:
        return sum(value.predicted_us * value.layers for value in self.offloaded.values())
