"""A cost model seen from one mesh, with axes by number, as building a partition problem wants it."""
from __future__ import annotations

from passes.costs import OptimizerModel, RooflineCost
from passes.mesh import Mesh

KINDS = {"lookup": "embedding"}


class MeshPrices:
    """Implements `passes.partition.choices.Prices`; optimizer traffic depends on the parameter's dtype."""

    def __init__(self, mesh: Mesh, states: int):
        self.mesh, self.states = mesh, states
        self.cost = RooflineCost(mesh.device, mesh)
        self._optimizers: dict[str, RooflineCost] = {}
        self._collectives: dict[tuple[str, int, float], float] = {}

    def compute_us(self, flops: float, nbytes: float, dtype: str, kind: str) -> float:
        return self.cost.compute_us(flops, nbytes, dtype, KINDS.get(kind, kind))

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
            self._optimizers[dtype] = RooflineCost(
                self.mesh.device, self.mesh, OptimizerModel(size, size, self.states * size)
            )
        return self._optimizers[dtype].optimizer_us(elements)
