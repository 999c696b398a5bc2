"""Energy model: power of a device while it computes, communicates or waits, and the slowdown under a power cap.

    energy of a step = sum over devices of  time of a kernel · its power  +  bytes sent · energy per byte of the link

Powers of a device (`Power.of`), in watts, from its idle_power_w and busy_power_w:

    matrix products, convolutions, attention    busy_power_w
    everything else (memory-bound)              idle + MEMORY_SHARE · (busy - idle)
    communication                               idle + COMMUNICATION_SHARE · (busy - idle)
    waiting                                     idle_power_w

The shares are estimates; a device may say its own (`Device.memory_power_w`, `Device.communication_power_w`). Patel et
al., "Characterizing power management opportunities for LLMs in the cloud", ASPLOS 2024, measured the pattern on A100s:
compute-bound phases reach the rated power, memory-bound ones stay well below, and communication between them makes
troughs, which a power cap does not touch. Choi et al., "A roofline model of energy", IPDPS 2013, is the finer model
(joules per FLOP and per byte). Hosts, fans and switches are not counted.

A cap (`capped`) slows arithmetic down by dynamic voltage and frequency scaling. The dynamic power of CMOS is C·V²·f, and
over the useful range V grows with f, so that it grows with f³: the cube-root rule, see Mudge, "Power: a first-class
architectural design constraint", IEEE Computer 34(4), 2001. Energy per operation then has a minimum, at a cap of 1.5
times the idle power. Drivers accept no caps that low (an H100: 200 to 700 W).
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from passes.cost_model.algebra import NUMBERS
from passes.cost_model.base import COLLECTIVE_KINDS
from passes.cost_model.cost_terms import Prices
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.device import Device
from passes.hardware.mesh import Mesh, MeshAxis
from passes.json_records import FrozenMap

MEMORY_SHARE = {"cuda": 0.6, "cpu": 0.9}
COMMUNICATION_SHARE = {"cuda": 0.3, "cpu": 0.6}
"""Fraction of busy - idle, by kind of device: estimates. A CPU moves the bytes of a collective itself."""

ARITHMETIC_KINDS = ("matmul", "convolution", "attention")


@dataclass(frozen=True)
class Power:
    """Watts of one device by activity."""

    arithmetic_w: float
    memory_w: float
    communication_w: float
    idle_w: float

    @staticmethod
    def of(device: Device) -> Power:
        """The device's own values, else shares of its busy power; nothing exceeds busy_power_w."""
        idle, dynamic = device.idle_power_w, device.busy_power_w - device.idle_power_w
        memory, communication = device.memory_power_w, device.communication_power_w
        return Power(
            device.busy_power_w,
            idle + MEMORY_SHARE[device.kind] * dynamic if memory is None else memory,
            idle + COMMUNICATION_SHARE[device.kind] * dynamic if communication is None else communication,
            idle,
        )

    def kernel_w(self, kind: str) -> float:
        """Watts during a kernel of one of `passes.cost_model.COMPUTE_KINDS`."""
        return self.arithmetic_w if kind in ARITHMETIC_KINDS else self.memory_w


def capped(device: Device, watts: float) -> Device:
    """The device as it runs under a power cap; itself if the cap is not below its busy power.

    - Arithmetic, which draws the busy power, runs at the clock that the cap allows:
      every peak rate is multiplied by ((watts - idle) / (busy - idle))^(1/3).
    - Memory-bound work draws less. It is unaffected until the cap reaches its power, and below that its bytes, each of
      which takes the same energy, come more slowly: bandwidth is multiplied by (watts - idle) / (memory - idle).
    - Communication keeps its rate; its power is at most the cap. Launch latency stays.

    Raises BadInput unless the cap is above the idle power. Caps compose: the lower one counts.
    """
    idle = device.idle_power_w
    if not watts > idle:
        raise BadInput(f"a power cap of {watts:g} W leaves nothing to compute with: {device.name} draws {idle:g} W idle",
                       "power_cap", f"give more than {idle:g} W; {device.busy_power_w:g} W is full speed")
    if watts >= device.busy_power_w:
        return device
    power = Power.of(device)
    clock = ((watts - idle) / (device.busy_power_w - idle)) ** (1 / 3)
    bandwidth = min(1.0, (watts - idle) / (power.memory_w - idle)) if power.memory_w > idle else 1.0
    return replace(
        device,
        busy_power_w=float(watts),
        memory_power_w=min(power.memory_w, watts),
        communication_power_w=min(power.communication_w, watts),
        peak_flops_per_s=FrozenMap({dtype: rate * clock for dtype, rate in device.peak_flops_per_s.items()}),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * bandwidth,
        source=f"{device.source}; under a cap of {watts:g} W, by the cube-root rule",
    )


def capped_cluster(cluster: Cluster, watts: float | None) -> Cluster:
    """The cluster with every device under the cap of `watts` (None: no cap). Raises BadInput as `capped` does."""
    if watts is None:
        return cluster
    return replace(cluster, groups=tuple(replace(g, device=capped(g.device, watts)) for g in cluster.groups))


def sent_bytes(kind: str, size: int, nbytes: float) -> float:
    """Bytes that each of `size` devices sends in a collective of `nbytes`, as `CostModel.collective_us` defines them.

    Counts the algorithms that move least, the rings of `passes.cost_model.collective_costs`; raises ValueError on another kind.
    """
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"unknown collective {kind!r}; legal kinds: {', '.join(COLLECTIVE_KINDS)}")
    if size == 1:
        return 0.0
    return nbytes * {"all_reduce": 2 * (size - 1) / size, "send_recv": 1.0}.get(kind, (size - 1) / size)


def link_j(kind: str, axis: MeshAxis, nbytes: float) -> float:
    """Joules on the links, per device, for one collective on a mesh axis."""
    return sent_bytes(kind, axis.size, nbytes) * axis.energy_j_per_byte


class EnergyPrices:
    """`passes.cost_model.cost_terms.Prices` whose sum is the energy of a step: the µJ of one device (W · µs) in place of µs.

    A problem built from them minimizes energy, and a cost recomputed with them is one. All devices do the same: times their
    number, it is the energy of the mesh. above_idle: only what devices draw besides their idle power.
    """

    algebra = NUMBERS

    def __init__(self, times: Prices, mesh: Mesh, above_idle: bool = False):
        self.times, self.mesh, self.power = times, mesh, Power.of(mesh.device)
        self.left_out_w = self.power.idle_w if above_idle else 0.0

    @property
    def keyed(self) -> bool:
        return self.times.keyed

    def kernel(self, flops: float, nbytes: float, dtype: str, kind: str, key: str = "") -> float:
        return self.times.kernel(flops, nbytes, dtype, kind, key) * (self.power.kernel_w(kind) - self.left_out_w)

    def collective(self, kind: str, axis: int, nbytes: float) -> float:
        time_us = self.times.collective(kind, axis, nbytes)
        return time_us * (self.power.communication_w - self.left_out_w) + 1e6 * link_j(kind, self.mesh.axes[axis], nbytes)

    def update(self, elements: float, dtype: str) -> float:
        return self.times.update(elements, dtype) * (self.power.memory_w - self.left_out_w)
