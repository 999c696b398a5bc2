"""What a rank keeps of forward for backward under a byte budget, as part of a plan."""
from __future__ import annotations

from pydantic import Field

from hpml_compiler.plans.record_fields import Count, Microseconds, Record


class SavedValue(Record):
    """A value that is kept: the block that it is made in, and its bytes on one device. layers: how many have such a value,
    where the block stands for several; bytes, and times, are of one of them."""

    block: str
    bytes: Count
    layers: int = 1


class OffloadedValue(SavedValue):
    """One that is out of the device's memory in between, and what moving it out and back takes."""

    predicted_us: Microseconds


class RecomputedCall(Record):
    """A call of forward that backward runs once more: the block that it is in, and what that takes, in each of `layers`."""

    block: str
    predicted_us: Microseconds
    layers: int = 1


class PeakRecord(Record):
    """When forward or backward of a graph holds most: the node that runs then, and bytes by part ("gradients", "saved",
    "recomputed", "transient"). again: whether it is a node of forward that backward runs once more."""

    node: str
    block: str
    again: bool
    parts: dict[str, Count]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class CheckpointingPlan(Record):
    """What a byte budget decided of one graph, by the nodes that a rank runs, and what a call of it holds besides parameters,
    the optimizer's state and its inputs: when forward and backward hold most; `saved_bytes` from forward to backward;
    `gradient_bytes` afterwards, until the optimizer has read them. `budget_bytes`: what a whole step may hold; `step_bytes`:
    what it holds, with parameters and state, while the optimizer makes its step, as far as its graphs were known by then.
    `ahead`: whether what is gathered is under way while the block before computes."""

    budget_bytes: Count
    saved_bytes: Count
    gradient_bytes: Count
    step_bytes: Count = 0
    ahead: bool = True
    saved: dict[str, SavedValue]
    offloaded: dict[str, OffloadedValue] = Field(default_factory=dict)
    again: dict[str, RecomputedCall]
    forward: PeakRecord
    backward: PeakRecord

    @property
    def again_us(self) -> float:
        return sum(call.predicted_us * call.layers for call in self.again.values())

    @property
    def offload_us(self) -> float:
        return sum(value.predicted_us * value.layers for value in self.offloaded.values())
