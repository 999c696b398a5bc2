"""What a simulation found: events, where the time of a step went, bytes over time, energy."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from passes.simulation.step_timeline import TimelineEvent

ESTIMATED = "estimated"
"""Label of an energy that follows from a device's data sheet and no meter."""


@dataclass(frozen=True)
class Simulation:
    """One step. Times are means over the ranks, and

        step_us = compute_us + exposed_communication_us + bubble_us + optimizer_us.

    compute_us, optimizer_us: what the work takes when nothing else runs. exposed_communication_us: what communication
    adds to the step: while no work can be done for want of what is on its way, and by slowing work that overlaps it.
    bubble_us: neither stream has anything to do. communication_us: all communication, hidden or not, when nothing else
    runs. peak_bytes, memory: of the rank that needs most; memory is (µs, bytes held from then on). energy_j: of all
    ranks together; `energy_label` says where it is from, None where the power of the device is not known. A lane is a
    class of ranks that do the same; fullest_lane: the one that memory is of. parts: the same as memory, by part ("parameters",
    "optimizer", "gradients", "saved", "recomputed", "gathered", "transient"; of stages that were given, "held").
    """

    step_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    bubble_us: float
    optimizer_us: float
    peak_bytes: int
    energy_j: float | None
    energy_label: str
    events: tuple[TimelineEvent, ...]
    memory: tuple[tuple[float, int], ...]
    ranks_of_lane: tuple[tuple[int, ...], ...]
    fullest_lane: int = 0
    parts: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """All but events and memory over time, as plain JSON values; ranks as counts."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _LONG}
        return {**found, "ranks_of_lane": [len(ranks) for ranks in self.ranks_of_lane], "events": len(self.events)}

    def to_json(self) -> str:
        """Everything, as strict JSON text."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "events"}
        return json.dumps({**found, "events": [asdict(event) for event in self.events]}, allow_nan=False) + "\n"


_LONG = ("events", "memory", "parts", "ranks_of_lane")


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-63` where they follow each other, else how many there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"{len(ranks)} ranks"
