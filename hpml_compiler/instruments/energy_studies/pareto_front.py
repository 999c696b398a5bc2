"""Points of time and energy, and the front of those that no other point beats in both."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ParetoPoint:
    """One plan: how it was asked for, what a step takes.

    energy_j: of all devices in one step; power_w: of one device, on average. power_cap_w: None where there is no cap.
    """

    devices: int
    mesh: dict[str, int]
    power_cap_w: float | None
    objective: str
    step_time_s: float
    energy_j: float
    power_w: float
    energy_label: str
    peak_bytes: int


@dataclass(frozen=True)
class InfeasiblePoint:
    """A plan that was asked for and is not to be had, and why."""

    devices: int
    mesh: dict[str, int] | None
    power_cap_w: float | None
    objective: str
    reason: str


@dataclass(frozen=True)
class Sweep:
    """All points of one model on (parts of) one cluster."""

    cluster: str
    points: tuple[ParetoPoint, ...]
    missed: tuple[InfeasiblePoint, ...] = ()

    @property
    def front(self) -> list[ParetoPoint]:
        return non_dominated(self.points)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: every point, with `on_front`, by time; then what was missed."""
        front = {id(point) for point in self.front}
        ordered = sorted(self.points, key=lambda point: (point.step_time_s, point.energy_j))
        return {
            "cluster": self.cluster,
            "points": [{**asdict(point), "on_front": id(point) in front} for point in ordered],
            "missed": [asdict(each) for each in self.missed],
        }


def non_dominated(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """The front, fastest first: each next point is slower and takes less energy. Of equal points, the first given."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.step_time_s, point.energy_j)):
        if not front or point.energy_j < front[-1].energy_j:
            front.append(point)
    return front
