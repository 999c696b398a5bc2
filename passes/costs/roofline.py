"""Costs from a device's peak rates and bandwidth, and the α-β costs of collectives."""
from __future__ import annotations

from dataclasses import dataclass, field

from passes.costs.base import COMPUTE_KINDS, OptimizerModel
from passes.costs.collectives import collective_us
from passes.device import Device
from passes.mesh import Mesh, MeshAxis


@dataclass(frozen=True)
class RooflineCost:
    """A `CostModel`: a kernel takes the longer of its arithmetic and its memory traffic, plus its launch.

        compute_us = max(flops / (peak · efficiency), bytes / (bandwidth · efficiency)) + launch latency

    (Williams, Waterman and Patterson, "Roofline", 2009.) Matrix products and convolutions have the device's
    matmul_efficiency, attention its attention_efficiency; everything else runs on the vector units, at float32's
    rate at most. A collective is one more kernel. Call it on one mesh; it is cheap (below 2 µs a call).
    """

    device: Device
    mesh: Mesh
    optimizer: OptimizerModel = OptimizerModel()
    _us_per_flop: dict[tuple[str, str], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _us_per_byte: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bandwidth = self.device.memory_bandwidth_bytes_per_s * self.device.memory_efficiency
        object.__setattr__(self, "_us_per_byte", 1e6 / bandwidth)

    def compute_us(self, flops: float, bytes_moved: float, dtype: str, kind: str) -> float:
        """See `CostModel.compute_us`."""
        us_per_flop = self._us_per_flop.get((kind, dtype))
        if us_per_flop is None:
            us_per_flop = self._us_per_flop[kind, dtype] = self._find_us_per_flop(kind, dtype)
        if kind == "view":
            return 0.0
        arithmetic_us = flops * us_per_flop
        memory_us = bytes_moved * self._us_per_byte
        return (arithmetic_us if arithmetic_us > memory_us else memory_us) + self.device.launch_latency_us

    def collective_us(self, kind: str, axis: MeshAxis, nbytes: float) -> float:
        """See `CostModel.collective_us`."""
        us = collective_us(kind, axis, nbytes)
        return us + self.device.launch_latency_us if us else 0.0

    def optimizer_us(self, elements: float) -> float:
        """See `CostModel.optimizer_us`: the traffic of `optimizer` over the memory bandwidth; 0 for no elements."""
        return elements * self.optimizer.traffic_bytes(self.device.kind == "cpu") * self._us_per_byte

    def _find_us_per_flop(self, kind: str, dtype: str) -> float:
        if kind not in COMPUTE_KINDS:
            raise ValueError(f"unknown kind of kernel {kind!r}; legal kinds: {', '.join(COMPUTE_KINDS)}")
        device = self.device
        if kind in ("matmul", "convolution"):
            rate = device.peak(dtype) * device.matmul_efficiency
        elif kind == "attention":
            rate = device.peak(dtype) * device.attention_efficiency
        else:
            rate = min(device.peak(dtype), device.peak("float32"))
        return 1e6 / rate
