"""Costs from a device's peak rates and bandwidth, and the α-β costs of collectives."""
from __future__ import annotations

from dataclasses import dataclass, field

from passes.cost_model.base import OptimizerModel
from passes.cost_model.collective_costs import collective_us
from passes.cost_model.efficiency_curves import ArithmeticCurve, MemorySegment, arithmetic, memory_segments
from passes.hardware.device import Device
from passes.hardware.mesh import Mesh, MeshAxis


@dataclass(frozen=True)
class RooflineCost:
    """A `CostModel`: a kernel takes the longer of its arithmetic and its memory traffic, plus its launch.

        compute_us = max(arithmetic_us(flops, bytes), memory_us(bytes)) + launch latency

    (Williams, Waterman and Patterson, "Roofline", 2009), both by the curves in `passes.cost_model.efficiency_curves`: small and
    thin kernels get less of the peak rate, and data that fits a cache moves at its bandwidth. Matrix products and
    convolutions have the device's matmul_efficiency, attention its attention_efficiency; everything else runs on the
    vector units, at float32's rate at most. A collective is one more kernel. Call it on one mesh; it is cheap (below
    2 µs a call).
    """

    device: Device
    mesh: Mesh
    optimizer: OptimizerModel = OptimizerModel()
    _arithmetic: dict[tuple[str, str], ArithmeticCurve] = field(default_factory=dict, init=False, repr=False, compare=False)
    _segments: tuple[MemorySegment, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_segments", memory_segments(self.device))

    def compute_us(self, flops: float, bytes_moved: float, dtype: str, kind: str) -> float:
        """See `CostModel.compute_us`."""
        curve = self._arithmetic.get((kind, dtype))
        if curve is None:
            curve = self._arithmetic[kind, dtype] = arithmetic(self.device, kind, dtype)
        if kind == "view":
            return 0.0
        us_per_flop, us_per_byte, ramp_us = curve
        arithmetic_us = flops * us_per_flop + bytes_moved * us_per_byte + ramp_us
        for segment in self._segments:
            if bytes_moved <= segment[0]:
                break
        memory_us = segment[1] + bytes_moved * segment[2]
        return (arithmetic_us if arithmetic_us > memory_us else memory_us) + self.device.launch_latency_us

    def collective_us(self, kind: str, axis: MeshAxis, nbytes: float) -> float:
        """See `CostModel.collective_us`."""
        us = collective_us(kind, axis, nbytes)
        return us + self.device.launch_latency_us if us else 0.0

    def optimizer_us(self, elements: float) -> float:
        """See `CostModel.optimizer_us`: the traffic of `optimizer` over the memory bandwidth; 0 for no elements."""
        us_per_byte = self._segments[-1].us_per_byte  # parameters and states of a whole model: no cache holds them
        return elements * self.optimizer.traffic_bytes(self.device.kind == "cpu") * us_per_byte
