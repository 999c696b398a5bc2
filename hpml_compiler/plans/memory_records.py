"""The bytes of a plan: what a device holds of each kind, and the moment of a step at which it holds most."""
from __future__ import annotations

from pydantic import Field

from hpml_compiler.plans.record_fields import Count, Record

PARTS = ("parameters", "optimizer", "gradients", "saved", "recomputed", "gathered", "transient")
"""In the order in which they are shown. gathered: parameters whole that are stored in parts."""


class Peak(Record):
    """parts: bytes on the fullest device by part (`PARTS`), which add up to the peak. graph, node, block, phase: where in the
    step that is. counted: along what a rank runs, as where a byte budget decided what is kept; else the step was simulated."""

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
    """Predicted bytes on the fullest device. activations: all that is saved for backward. peak: the most that is held at a
    time; as not all of these are there at once, and others come and go, it is not their sum (see `GraphPlan.at_peak`)."""

    parameters: Count
    gradients: Count
    optimizer: Count
    activations: Count
    peak: Count
