"""Records of a plan's memory: bytes by kind on the fullest device, and the memory peak of a step."""
from __future__ import annotations

from pydantic import Field

from hpml_compiler.plans.record_fields import Count, Record

PARTS = ("parameters", "optimizer", "copies", "gradients", "saved", "recomputed", "gathered", "transient")
"""Parts of memory, in the order in which they are displayed. copies: of state, for `redundancy`. gathered: unsharded copies of
sharded parameters."""


class Peak(Record):
    """The memory peak of a step. parts: bytes on the fullest device by part (`PARTS`); their sum is the peak. graph, node,
    block, phase: where in the step it is. counted: on the graphs that ranks run: pipeline stages, and others
    whose activation checkpointing was decided under a memory budget; otherwise on the plan's operations."""

    parts: dict[str, Count] = Field(default_factory=dict)
    graph: str = ""
    node: str = ""
    block: str = ""
    phase: str = ""
    counted: bool = True

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class MemoryBytes(Record):
    """Predicted bytes on the fullest device. activations: all that is saved for backward. peak: the most that is in memory at
    one time. It is not the sum of the others, which are not all there at once, and it includes temporary values
    (see `GraphPlan.at_peak`). copies: of state (`redundancy`), where the device's memory is that of its host."""

    parameters: Count
    gradients: Count
    optimizer: Count
    activations: Count
    peak: Count
    copies: Count = 0
