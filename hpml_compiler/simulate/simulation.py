"""Result of a simulation: events, parts of the step time, memory over time, energy."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from passes.simulation.step_timeline import TimelineEvent

ESTIMATED = "estimated"
"""Label of an energy that is computed from data sheets, not measured."""


@dataclass(frozen=True)
class Simulation:
    """One simulated step. Times are means over the ranks, and

        step_us = compute_us + exposed_communication_us + bubble_us + optimizer_us.

    compute_us, optimizer_us: time of the work when nothing else runs. exposed_communication_us: time that communication
    adds to the step, where work waits for it and where it slows down overlapping work. bubble_us: time in which both streams
    are idle. communication_us: time of all communication, hidden or not, when nothing else runs. peak_bytes, memory: of the
    rank that needs the most; memory is a list of (µs, bytes from then on). energy_j: energy of all ranks together, None if the
    power of a device is not known; `energy_label`: its source. A lane is a class of ranks that do the same work; fullest_lane:
    the lane of `memory`. parts: memory over time by part ("parameters", "optimizer", "gradients", "saved", "recomputed",
    "gathered", "transient"; "held" for given stages).
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
        """All fields but events and memory over time, as plain JSON values; events and ranks as counts."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _LONG}
        return {**found, "ranks_of_lane": [len(ranks) for ranks in self.ranks_of_lane], "events": len(self.events)}

    def to_json(self) -> str:
        """All fields as strict JSON text."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "events"}
        return json.dumps({**found, "events": [asdict(event) for event in self.events]}, allow_nan=False) + "\n"


_LONG = ("events", "memory", "parts", "ranks_of_lane")


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0-63` if they are consecutive, else their number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"{len(ranks)} ranks"
