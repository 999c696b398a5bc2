"""Pareto front of step time and energy over a sweep of plans."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ParetoPoint:
    """One plan: its settings, and the time, energy and memory of a step.

    energy_j: of all devices in one step. power_w: average of one device. power_cap_w: None without a cap.
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
    """Settings for which no plan is feasible, and the reason."""

    devices: int
    mesh: dict[str, int] | None
    power_cap_w: float | None
    objective: str
    reason: str


@dataclass(frozen=True)
class Sweep:
    """All points of one model on one cluster or parts of it."""

    cluster: str
    points: tuple[ParetoPoint, ...]
    missed: tuple[InfeasiblePoint, ...] = ()

    @property
    def front(self) -> list[ParetoPoint]:
        return non_dominated(self.points)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: all points by time, with `on_front`, and the infeasible points."""
        front = {id(point) for point in self.front}
        ordered = sorted(self.points, key=lambda point: (point.step_time_s, point.energy_j))
        return {
            "cluster": self.cluster,
            "points": [{**asdict(point), "on_front": id(point) in front} for point in ordered],
            "missed": [asdict(each) for each in self.missed],
        }


def non_dominated(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """The Pareto front, fastest first: each next point is slower and takes less energy. Of equal points the first is kept."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.step_time_s, point.energy_j)):
        if not front or point.energy_j < front[-1].energy_j:
            front.append(point)
    return front
