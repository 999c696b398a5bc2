"""Measured prices of two nodes, as `hpml profile` leaves them."""
from __future__ import annotations

from typing import Any

from hpml_compiler.planner.graph import measured_costs
from passes.cost_model.measured.measured_collectives import KIND, CollectivePoint, MeasuredGroup
from passes.cost_model.measured.measured_kernels import FACTOR
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement, device_key
from passes.hardware.cluster import Cluster, builtin_sheet

SLOW_US, FAST_US = 50_000.0, 1.0
PINS: dict[str, Any] = {"microbatches": 4, "compiler": "eager", "optimizer": "sgd"}


def measure(collective_us: float) -> Cluster:
    """Leave a profile of two nodes with a CPU each, whose collectives take so long."""
    with MeasurementCache() as cache:
        cache.put(measured_costs.sharing_key("cpu", 1), FACTOR, "matmul", TimedMeasurement(1.0, 1))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for nbytes in (2**12, 2**22):
                point = CollectivePoint(kind, MeasuredGroup(2, 1, 2, 1, "gloo"), nbytes, collective_us + nbytes / 2**18)
                cache.put(device_key("cpu"), KIND, point.key, TimedMeasurement(point.us, 1, extra=point.extra))
    return Cluster.homogeneous(2, 1, builtin_sheet("cpu"))
