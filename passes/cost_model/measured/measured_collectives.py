"""Prices of collectives from measurements, and from formulas scaled by them where nothing was measured."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from passes.cost_model.base import COLLECTIVE_KINDS
from passes.cost_model.collective_costs import collective_us
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement
from passes.cost_model.measured.piecewise_linear import PiecewiseLinear, fit_piecewise
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import MeshAxis, price_axis

KIND = "collective"
"""The kind of these measurements in the cache."""

Formula = Callable[[str, MeshAxis, float], float]


@dataclass(frozen=True)
class MeasuredGroup:
    """The groups that a collective was measured on: `size` ranks each, `stride` apart, all groups at once."""

    size: int
    stride: int
    world_size: int
    devices_per_node: int
    backend: str

    def axis(self, device_type: str, device_name: str = "") -> MeshAxis:
        """The mesh axis of these groups on the machine this runs on (see `Cluster.local`)."""
        cluster = Cluster.local(
            self.world_size, device_type, device_name=device_name, devices_per_node=self.devices_per_node
        )
        return price_axis("measured", self.size, self.stride, cluster)


@dataclass(frozen=True)
class CollectivePoint:
    """One collective that was timed. nbytes: as `CostModel.collective_us` defines it for each kind."""

    kind: str
    group: MeasuredGroup
    nbytes: int
    us: float

    @property
    def key(self) -> str:
        """Its key in the cache."""
        g = self.group
        return (f"{self.kind} {g.backend} size={g.size} stride={g.stride} world={g.world_size} "
                f"per_node={g.devices_per_node} bytes={self.nbytes}")

    @property
    def extra(self) -> dict[str, Any]:
        """JSON values from which `read` restores the point."""
        return {"collective": self.kind, "bytes": self.nbytes, **asdict(self.group)}

    @staticmethod
    def read(measurement: TimedMeasurement) -> CollectivePoint:
        """The point of a measurement with that extra; raises KeyError or ValueError on another."""
        extra = measurement.extra
        if extra["collective"] not in COLLECTIVE_KINDS:
            raise ValueError(f"unknown collective {extra['collective']!r}")
        group = MeasuredGroup(**{f.name: extra[f.name] for f in fields(MeasuredGroup)})
        return CollectivePoint(extra["collective"], group, extra["bytes"], measurement.median_us)


def read_points(cache: MeasurementCache, device: str) -> list[CollectivePoint]:
    """Every collective measured on a device (see `passes.cost_model.measured.measurement_cache.device_key`), in order of the
    keys."""
    try:
        return [CollectivePoint.read(m) for m in cache.all(device, KIND).values()]
    except (KeyError, ValueError) as error:
        raise BadInput(f"a measured collective cannot be read: {error!r}", f"measurement cache {cache.path}",
                       "delete this file; `hpml profile` makes a new one") from error


def fit_points(points: Iterable[CollectivePoint]) -> dict[tuple[str, MeasuredGroup], PiecewiseLinear]:
    """The curve of each kind on each group that was measured at two sizes or more."""
    by_group: dict[tuple[str, MeasuredGroup], list[CollectivePoint]] = {}
    for point in points:
        by_group.setdefault((point.kind, point.group), []).append(point)
    return {
        key: fit_piecewise([p.nbytes for p in some], [p.us for p in some])
        for key, some in by_group.items() if len({p.nbytes for p in some}) > 1
    }


@dataclass(frozen=True)
class _CollectiveCurves:
    """Measurements of one kind on groups that the formula prices equally, however far apart their ranks are."""

    axis: MeshAxis
    world_size: int
    points: tuple[CollectivePoint, ...]

    def distance(self, axis: MeshAxis, world_size: int | None) -> tuple[float, ...]:
        """Distance from an axis: the levels it spans count first, then their links, their sizes, and the world."""
        mine, other = _levels(self.axis), _levels(axis)
        if len(mine) != len(other):
            return (1.0, 0.0, _apart([self.axis.size], [axis.size]), 0.0)
        return (
            0.0,
            _apart([v for _, *link in mine for v in link], [v for _, *link in other for v in link]),
            _apart([size for size, *_ in mine], [size for size, *_ in other]),
            _apart([self.world_size], [world_size]) if world_size is not None else 0.0,
        )


class MeasuredCollectives:
    """The collective half of a `CostModel`.

    A measured group takes the fitted time, launch included. Another one, of another size or level of the
    hierarchy, takes the formula's time multiplied by measured / formula of the nearest measured group at the same
    bytes; beyond the largest measured size, at that size. Kinds without measurements take the formula's time.
    Times never fall as bytes grow.

    points: see `read_points`. axis_of: the axis by which the formula prices a measured group, such as
    `MeasuredGroup.axis`. world_size: among equally near measurements, the one in a world nearest to this size is
    taken, since ranks compete for a host. formula: µs of kind, axis and bytes, above 0 on an axis longer than 1.
    """

    def __init__(self, points: Iterable[CollectivePoint], axis_of: Callable[[MeasuredGroup], MeshAxis],
                 world_size: int | None = None, formula: Formula = collective_us) -> None:
        self._formula, self._world_size = formula, world_size
        alike: dict[tuple[str, MeshAxis, int], list[CollectivePoint]] = {}
        for point in points:
            alike.setdefault((point.kind, axis_of(point.group), point.group.world_size), []).append(point)
        self._measured: dict[str, list[_CollectiveCurves]] = {}
        for (kind, axis, world), some in alike.items():
            self._measured.setdefault(kind, []).append(_CollectiveCurves(axis, world, tuple(some)))
        self._functions: dict[tuple[str, MeshAxis], Callable[[float], float]] = {}

    def is_measured(self, kind: str) -> bool:
        """True if the prices of a kind are based on measurements."""
        return kind in self._measured

    def collective_us(self, kind: str, axis: MeshAxis, nbytes: float) -> float:
        """See `CostModel.collective_us`."""
        function = self._functions.get((kind, axis))
        if function is None:
            function = self._functions[kind, axis] = self._function(kind, axis)
        return function(nbytes)

    def _function(self, kind: str, axis: MeshAxis) -> Callable[[float], float]:
        formula, measured = self._formula, self._measured.get(kind)
        if axis.size == 1 or not measured:
            return lambda nbytes: formula(kind, axis, nbytes)
        nearest = min(measured, key=lambda m: m.distance(axis, self._world_size))
        curve = self._scaled(kind, axis, nearest)
        largest = curve.knots[-1]
        beyond = curve.values[-1] / formula(kind, axis, largest)
        return lambda nbytes: curve(nbytes) if nbytes <= largest else beyond * formula(kind, axis, nbytes)

    def _scaled(self, kind: str, axis: MeshAxis, nearest: _CollectiveCurves) -> PiecewiseLinear:
        """formula(axis) · measured / formula(measured axis), up to the largest measured size, made nondecreasing."""
        sizes = sorted({float(p.nbytes) for p in nearest.points})
        if len(sizes) > 1:
            fit = fit_piecewise([p.nbytes for p in nearest.points], [p.us for p in nearest.points])
        else:  # one size gives one ratio
            ratio = float(np.mean([p.us for p in nearest.points])) / self._formula(kind, nearest.axis, sizes[0])
            ends = (0.0, sizes[0])
            fit = PiecewiseLinear(ends, tuple(ratio * self._formula(kind, nearest.axis, size) for size in ends))
        own = [self._formula(kind, axis, size) for size in fit.knots]
        if own == [self._formula(kind, nearest.axis, size) for size in fit.knots]:
            return fit
        # The product of fit and ratio is not linear between the knots of the fit: sample it in octaves.
        octaves = 2.0 ** np.arange(8, math.ceil(math.log2(sizes[-1])))
        knots = sorted({*fit.knots, *octaves[octaves < sizes[-1]].tolist()})
        ratios = [self._formula(kind, axis, size) / self._formula(kind, nearest.axis, size) for size in knots]
        values = np.maximum.accumulate([fit(size) * ratio for size, ratio in zip(knots, ratios)])
        return PiecewiseLinear(tuple(knots), tuple(values.tolist()))


def _levels(axis: MeshAxis) -> list[tuple[float, float, float]]:
    """(size, latency, bandwidth) of each level that an axis spans, inner first."""
    levels = axis.levels or (axis,)
    return [(level.size, level.latency_us, level.bandwidth_bytes_per_s) for level in levels]


def _apart(a: Iterable[float], b: Iterable[float]) -> float:
    """Total distance of two tuples of numbers, in octaves."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a, b))
