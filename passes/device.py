"""Devices and links: the figures that costs are priced on, and the built-in ones with their sources."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from passes.errors import BadInput
from passes.records import FrozenMap, from_json, read_json, to_json, write_json

DATA = Path(__file__).parent / "cluster_data"
_WIDE = ("float64", "int64", "uint64", "complex64", "complex128")


@dataclass(frozen=True)
class Device:
    """One device, as one rank sees it.

    memory_bytes is what a program can allocate; memory_bandwidth_bytes_per_s and peak_flops_per_s (dtype name -> rate,
    dense, no sparsity; a multiply and an add are two) are the vendor's. `float32` is IEEE float32; `tf32` stands apart.
    The efficiencies are the fractions of these that large kernels of each sort sustain. launch_latency_us is
    the time that one more kernel adds however small it is. Power is that of the whole device.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: FrozenMap
    launch_latency_us: float
    idle_power_w: float
    busy_power_w: float
    source: str
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.9

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        object.__setattr__(self, "peak_flops_per_s", FrozenMap(self.peak_flops_per_s))
        if self.kind not in ("cpu", "cuda"):
            raise BadInput(f"unknown kind {self.kind!r}", where, "legal kinds: cpu, cuda")
        if "float32" not in self.peak_flops_per_s:
            raise BadInput("peak_flops_per_s has no float32", where, "add it: unlisted dtypes run at its rate")
        _check_positive(self, where, "memory_bytes", "memory_bandwidth_bytes_per_s", "launch_latency_us")
        for dtype, rate in self.peak_flops_per_s.items():
            if not 0 < rate < math.inf:
                raise BadInput(f"the peak rate of {dtype} must be positive, got {rate}", where)
        for field in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, field) <= 1:
                raise BadInput(f"{field} must be in (0, 1], got {getattr(self, field)}", where)
        if not 0 <= self.idle_power_w <= self.busy_power_w < math.inf:
            raise BadInput("power must be 0 <= idle_power_w <= busy_power_w", where)

    def peak(self, dtype: str) -> float:
        """FLOP/s of `dtype`; one that is not listed runs at the rate of float32, half of it if wider than 4 bytes."""
        rate = self.peak_flops_per_s.get(dtype)
        if rate is None:
            rate = self.peak_flops_per_s["float32"] / (2 if dtype in _WIDE else 1)
        return rate


@dataclass(frozen=True)
class Link:
    """How devices reach each other at one level of the hierarchy.

    latency_us: of one message (the α of α-β). bandwidth_bytes_per_s: of one port (NIC), in one direction, as the
    vendor rates it; efficiency: the fraction of it that payload gets. shared_by: devices of a node that share a port.
    slowdown: per kind of collective, how many times longer its bytes take here than the formula in
    `passes.costs.collectives` says, where that was measured.
    """

    name: str
    latency_us: float
    bandwidth_bytes_per_s: float
    shared_by: int = 1
    efficiency: float = 1.0
    slowdown: FrozenMap = FrozenMap()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        object.__setattr__(self, "slowdown", FrozenMap(self.slowdown))
        _check_positive(self, where, "latency_us", "bandwidth_bytes_per_s", "shared_by")
        if not 0 < self.efficiency <= 1:
            raise BadInput(f"efficiency must be in (0, 1], got {self.efficiency}", where)
        for kind, factor in self.slowdown.items():
            if not 0 < factor < math.inf:
                raise BadInput(f"the slowdown of {kind} must be positive, got {factor}", where)

    def device_bytes_per_s(self, devices_per_node: int) -> float:
        """Bytes/s that each device gets in one direction while all devices of its node use the link."""
        return self.bandwidth_bytes_per_s * self.efficiency / min(self.shared_by, devices_per_node)


@dataclass(frozen=True)
class DeviceSheet:
    """A device file: the device, the links of the nodes it usually sits in, and a pattern of its name in torch.

    torch_name is a regular expression for `torch.cuda.get_device_name()`; empty where nothing is to match.
    """

    device: Device
    intra_node: Link
    inter_node: Link
    torch_name: str = ""

    @staticmethod
    def load(path: str | Path) -> DeviceSheet:
        """Reads a device file, strictly; raises BadInput that names the file and the key."""
        return from_json(DeviceSheet, read_json(path), str(path))

    def save(self, path: str | Path) -> None:
        write_json(to_json(self), path)


@cache
def builtin_devices() -> tuple[str, ...]:
    """Names of the built-in devices, cpu first."""
    return tuple(sorted((p.stem for p in DATA.glob("*.json")), key=lambda name: (name != "cpu", name)))


@cache
def builtin_sheet(name: str) -> DeviceSheet:
    """The built-in device file of that name; raises BadInput that lists them."""
    if name not in builtin_devices():
        raise BadInput(
            f"unknown device {name!r}",
            "cluster",
            f"built-in devices: {', '.join(builtin_devices())}; or the path of a device file (.json)",
        )
    return DeviceSheet.load(DATA / f"{name}.json")


def sheet_for_torch_name(torch_name: str) -> DeviceSheet | None:
    """The built-in device file whose pattern is found in a `torch.cuda.get_device_name()`, or None."""
    sheets = [builtin_sheet(name) for name in builtin_devices()]
    return next((s for s in sheets if s.torch_name and re.search(s.torch_name, torch_name)), None)


def _check_positive(record: object, where: str, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < math.inf:
            raise BadInput(f"{name} must be positive, got {value}", where)
