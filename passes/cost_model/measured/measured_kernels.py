"""Costs from `hpml profile`'s measurements on this device, and from a roofline scaled by them elsewhere.

    kernel that was measured       launch_us + its median
    other kernel of kind k         launch_us + (roofline without its launch) · factor[k]
    collective                     its measured curve + collective_us
    optimizer                      tensor_us per parameter + (roofline's traffic) · factor["optimizer"]
    a step besides                 graph_us for every call of a forward or backward graph

factor[k] is the median of measured over predicted, so that unmeasured kernels err like measured ones.
Measurements of the planned graph itself take precedence over those of other graphs, of which the median is taken.
"""
from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.cost_model.measured.measured_collectives import MeasuredCollectives
from passes.cost_model.measured.measurement_cache import MeasurementCache
from passes.cost_model.roofline import RooflineCost
from passes.hardware.mesh import MeshAxis

OPERATION, FACTOR, OVERHEAD = "op", "factor", "overhead"
"""Kinds of measurements in the cache. A factor's `median_us` is a plain ratio."""
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class DeviceMeasurements:
    """Measurements of one device. operations: by `measurement_key_of`, µs. factors: by kind of kernel, or OPTIMIZER.

    launch_us: host time of a step per kernel, besides the kernel; graph_us: of one call of a compiled
    forward or backward graph; tensor_us: of the optimizer per parameter; collective_us: of a collective in a step,
    beyond its time after a barrier. launch_us None: not measured.
    """

    operations: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    launch_us: float | None = None
    graph_us: float = 0.0
    tensor_us: float = 0.0
    collective_us: float = 0.0

    @staticmethod
    def load(cache: MeasurementCache, device: str, graph: str = "") -> DeviceMeasurements | None:
        """None without measurements of that device (see `passes.cost_model.measured.measurement_cache.device_key`).
        graph: its hash; factors and overheads are stored as `name@hash`."""
        found = {kind: {key: m.median_us for key, m in cache.all(device, kind).items()}
                 for kind in (OPERATION, FACTOR, OVERHEAD)}
        if not any(found.values()):
            return None
        factors, overhead = _of_graph(found[FACTOR], graph), _of_graph(found[OVERHEAD], graph)
        return DeviceMeasurements(found[OPERATION], factors, overhead.get("launch"), overhead.get("graph", 0.0),
                                  overhead.get("tensor", 0.0), overhead.get("collective", 0.0))


def _of_graph(values: Mapping[str, float], graph: str) -> dict[str, float]:
    """By name: the value of that graph, else the median over all graphs."""
    by_name: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        name, _, of = key.partition("@")
        by_name.setdefault(name, {})[of] = value
    return {name: some.get(graph, statistics.median(some.values())) for name, some in by_name.items()}


@dataclass(frozen=True)
class MeasuredCost:
    """A `CostModel` on top of a roofline. `compute_us` also takes the key of the operation, if it has one."""

    roofline: RooflineCost
    measurements: DeviceMeasurements
    collectives: MeasuredCollectives | None = None

    def compute_us(self, flops: float, bytes_moved: float, dtype: str, kind: str, key: str = "") -> float:
        """See `CostModel.compute_us`; `key`: as `passes.cost_model.measured.measurement_key` has it, "" for a fused kernel."""
        launch_us = self.roofline.device.launch_latency_us
        own_us = launch_us if self.measurements.launch_us is None else self.measurements.launch_us
        known = self.measurements.operations.get(key) if key else None
        if known is not None:
            return own_us + known
        priced_us = self.roofline.compute_us(flops, bytes_moved, dtype, kind)
        if kind == "view":
            return priced_us
        return own_us + (priced_us - launch_us) * self.measurements.factors.get(kind, 1.0)

    def collective_us(self, kind: str, axis: MeshAxis, nbytes: float) -> float:
        """See `CostModel.collective_us`."""
        if self.collectives is None or not self.collectives.is_measured(kind):
            return self.roofline.collective_us(kind, axis, nbytes)
        us = self.collectives.collective_us(kind, axis, nbytes)
        return us + self.measurements.collective_us if us else 0.0

    def optimizer_us(self, elements: float) -> float:
        """See `CostModel.optimizer_us`, for the elements of one parameter."""
        if not elements:
            return 0.0
        factor = self.measurements.factors.get(OPTIMIZER, 1.0)
        return self.measurements.tensor_us + self.roofline.optimizer_us(elements) * factor
