"""Prices of a cost model on one mesh, with axes by number, for building a placement problem."""
from __future__ import annotations

from dataclasses import dataclass

from passes.cost_model.algebra import NUMBERS
from passes.cost_model.base import CostModel, OptimizerModel
from passes.cost_model.measured.measured_collectives import MeasuredCollectives
from passes.cost_model.measured.measured_kernels import DeviceMeasurements, MeasuredCost
from passes.cost_model.roofline import RooflineCost
from passes.hardware.mesh import Mesh


@dataclass(frozen=True)
class CachedMeasurements:
    """Measurements that `hpml profile` left in the cache for the planned devices."""

    measurements: DeviceMeasurements
    collectives: MeasuredCollectives | None


class MeshPrices:
    """`passes.cost_model.cost_terms.Prices` of one mesh, in µs. states: optimizer tensors per parameter, in its
    dtype.

    measured: replaces the roofline where there are measurements. cost: a cost model to use instead of both;
    its optimizer has one dtype, and its time is proportional to the bytes that are read and written.
    """

    algebra = NUMBERS

    def __init__(self, mesh: Mesh, states: int, measured: CachedMeasurements | None = None, cost: CostModel | None = None):
        self.mesh, self.states, self.measured, self.given = mesh, states, measured, cost
        self.cost = cost or self._cost(OptimizerModel())
        self._updates: dict[str, tuple[CostModel, float]] = {}
        self._collectives: dict[tuple[str, int, float], float] = {}

    @property
    def keyed(self) -> bool:
        return isinstance(self.cost, MeasuredCost)

    def kernel(self, flops: float, nbytes: float, dtype: str, kind: str, key: str = "") -> float:
        if key and isinstance(self.cost, MeasuredCost):
            return self.cost.compute_us(flops, nbytes, dtype, kind, key)
        return self.cost.compute_us(flops, nbytes, dtype, kind)

    def collective(self, kind: str, axis: int, nbytes: float) -> float:
        key = (kind, axis, nbytes)
        if key not in self._collectives:
            self._collectives[key] = self.cost.collective_us(kind, self.mesh.axes[axis], nbytes)
        return self._collectives[key]

    def update(self, elements: float, dtype: str) -> float:
        if dtype not in self._updates:
            self._updates[dtype] = self._optimizer(dtype)
        cost, factor = self._updates[dtype]
        return cost.optimizer_us(elements * factor)

    @property
    def overhead_us(self) -> float:
        """Overhead of a call of a compiled graph, forward or backward, besides its kernels; 0 without measurements."""
        return self.measured.measurements.graph_us if self.measured is not None else 0.0

    def _optimizer(self, dtype: str) -> tuple[CostModel, float]:
        """The cost model for parameters of a dtype, and how many elements of its dtype one parameter element counts as."""
        size = 8 if dtype == "float64" else 2 if dtype in ("bfloat16", "float16") else 4
        optimizer = OptimizerModel(size, size, self.states * size)
        if self.given is None:
            return self._cost(optimizer), 1.0
        cpu, own = self.mesh.device.kind == "cpu", getattr(self.given, "optimizer", OptimizerModel())
        return self.given, optimizer.traffic_bytes(cpu) / own.traffic_bytes(cpu)

    def _cost(self, optimizer: OptimizerModel) -> RooflineCost | MeasuredCost:
        roofline = RooflineCost(self.mesh.device, self.mesh, optimizer)
        if self.measured is None:
            return roofline
        return MeasuredCost(roofline, self.measured.measurements, self.measured.collectives)
