"""A cost model seen from one mesh, with axes by number, as building a partition problem wants it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.costs import OptimizerModel, RooflineCost
from passes.costs.measured import MeasuredCost, Measurements
from passes.costs.measured_collectives import MeasuredCollectives
from passes.graph.layouts import Layout
from passes.graph.operation_key import operation_key
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.machine.mesh import Mesh

KINDS = {"lookup": "embedding"}


@dataclass(frozen=True)
class Measured:
    """What `hpml profile` left in the cache for the devices that a plan is for."""

    measurements: Measurements
    collectives: MeasuredCollectives | None


class MeshPrices:
    """Implements `passes.partition.choices.Prices`; optimizer traffic depends on the parameter's dtype."""

    def __init__(self, mesh: Mesh, states: int, measured: Measured | None = None):
        self.mesh, self.states, self.measured = mesh, states, measured
        self.cost = self._cost(OptimizerModel())
        self._optimizers: dict[str, RooflineCost | MeasuredCost] = {}
        self._collectives: dict[tuple[str, int, float], float] = {}

    def compute_us(self, flops: float, nbytes: float, dtype: str, kind: str) -> float:
        return self.cost.compute_us(flops, nbytes, dtype, KINDS.get(kind, kind))

    def operation_us(
        self, graph: PlacementGraph, op: Operation, inputs: Sequence[Layout], made: Sequence[Layout],
        sizes: tuple[int, ...], flops: float, nbytes: float,
    ) -> float:
        dtype, kind = graph.values[op.outputs[0]].spec.dtype, KINDS.get(op.kind, op.kind)
        if isinstance(self.cost, MeasuredCost):
            return self.cost.compute_us(flops, nbytes, dtype, kind, operation_key(graph, op, inputs, made, sizes))
        return self.cost.compute_us(flops, nbytes, dtype, kind)

    def copy_us(self, nbytes: float) -> float:
        return self.cost.compute_us(0.0, nbytes, "float32", "pointwise")

    def collective_us(self, kind: str, axis: int, nbytes: float) -> float:
        key = (kind, axis, nbytes)
        if key not in self._collectives:
            self._collectives[key] = self.cost.collective_us(kind, self.mesh.axes[axis], nbytes)
        return self._collectives[key]

    def optimizer_us(self, elements: float, dtype: str) -> float:
        if dtype not in self._optimizers:
            size = 8 if dtype == "float64" else 2 if dtype in ("bfloat16", "float16") else 4
            self._optimizers[dtype] = self._cost(OptimizerModel(size, size, self.states * size))
        return self._optimizers[dtype].optimizer_us(elements)

    @property
    def overhead_us(self) -> float:
        """Of a call of a compiled graph, forward or backward, besides its kernels; 0 where it was not measured."""
        return self.measured.measurements.graph_us if self.measured is not None else 0.0

    def _cost(self, optimizer: OptimizerModel) -> RooflineCost | MeasuredCost:
        roofline = RooflineCost(self.mesh.device, self.mesh, optimizer)
        if self.measured is None:
            return roofline
        return MeasuredCost(roofline, self.measured.measurements, self.measured.collectives)
