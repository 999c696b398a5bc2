"""Devices and links: the figures that prices are based on, and the built-in ones with their sources."""
from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from functools import cache as memoize
from pathlib import Path

from passes.errors import BadInput, shortened
from passes.hardware.link import ASSUMED_CPU_HOST, ASSUMED_HOST, ASSUMED_STORAGE, Link, check_positive
from passes.json_records import FrozenMap, from_json, read_json, to_json, write_json

DATA = Path(__file__).parent / "cluster_data"
_WIDE = ("float64", "int64", "uint64", "complex64", "complex128")


@dataclass(frozen=True)
class Cache:
    """A cache level: kernels that move at most `bytes` run at its bandwidth, as sustained (no efficiency on top)."""

    bytes: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Device:
    """One device, as one rank sees it.

    memory_bytes can be allocated by a program; memory_bandwidth_bytes_per_s and peak_flops_per_s (dtype name -> rate,
    dense, no sparsity; a multiply and an add are two) are the vendor's. `float32` is IEEE float32; `tf32` stands apart.
    The efficiencies are the fractions of these that large kernels of each sort sustain. launch_latency_us is
    the time that one more kernel adds however small it is. Power is that of the whole device; memory_power_w (while a
    memory-bound kernel runs) and communication_power_w are estimated where they are None (`passes.cost_model.energy_model`).

    Losses of kernels that are not large (`passes.cost_model.efficiency_curves` has the formulas): the ramps are the time that a
    matrix product or attention takes beyond its launch to fill and drain the device; a product whose mean dim (a third
    of n for n x n x n, m for a thin m x n x k) is half_dim has half the efficiency. caches: smallest first.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: FrozenMap[str, float]
    launch_latency_us: float
    idle_power_w: float
    busy_power_w: float
    source: str
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.9
    matmul_ramp_us: float = 0.0
    matmul_half_dim: float = 0.0
    attention_ramp_us: float = 0.0
    attention_half_dim: float = 0.0
    caches: tuple[Cache, ...] = ()
    memory_power_w: float | None = None
    communication_power_w: float | None = None

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        object.__setattr__(self, "peak_flops_per_s", FrozenMap(self.peak_flops_per_s))
        if self.kind not in ("cpu", "cuda"):
            raise BadInput(f"unknown kind {self.kind!r}", where, "legal kinds: cpu, cuda")
        if "float32" not in self.peak_flops_per_s:
            raise BadInput("peak_flops_per_s has no float32", where, "add it: unlisted dtypes run at its rate")
        check_positive(self, where, "memory_bytes", "memory_bandwidth_bytes_per_s", "launch_latency_us")
        for dtype, rate in self.peak_flops_per_s.items():
            if not 0 < rate < math.inf:
                raise BadInput(f"the peak rate of {dtype} must be positive, got {rate}", where, "give it in FLOP/s")
        for field in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, field) <= 1:
                raise BadInput(f"{field} must be in (0, 1], got {getattr(self, field)}", where,
                               "give the fraction of the peak that large kernels reach")
        for field in ("matmul_ramp_us", "matmul_half_dim", "attention_ramp_us", "attention_half_dim"):
            if not 0 <= getattr(self, field) < math.inf:
                raise BadInput(f"{field} must be 0 or positive, got {getattr(self, field)}", where,
                               "0 is a device that loses nothing on small kernels")
        for cache in self.caches:
            check_positive(cache, f"{where}: caches", "bytes", "bandwidth_bytes_per_s")
        for small, large in zip(self.caches, self.caches[1:], strict=False):
            if large.bytes < 2 * small.bytes or large.bandwidth_bytes_per_s >= small.bandwidth_bytes_per_s:
                raise BadInput("each cache must be at least twice as large as the one before, and slower", where,
                               "list caches from the smallest to the largest")
        if not 0 <= self.idle_power_w <= self.busy_power_w < math.inf:
            raise BadInput("power must be 0 <= idle_power_w <= busy_power_w", where, "give watts of the whole device")
        for field in ("memory_power_w", "communication_power_w"):
            watts = getattr(self, field)
            if watts is not None and not self.idle_power_w <= watts <= self.busy_power_w:
                raise BadInput(f"{field} must be between idle_power_w and busy_power_w, got {watts}", where,
                               "leave it out to have it estimated")

    def peak(self, dtype: str) -> float:
        """FLOP/s of `dtype`; one that is not listed runs at the rate of float32, half of it if wider than 4 bytes."""
        rate = self.peak_flops_per_s.get(dtype)
        if rate is None:
            rate = self.peak_flops_per_s["float32"] / (2 if dtype in _WIDE else 1)
        return rate


@dataclass(frozen=True)
class DeviceSheet:
    """A device file: the device, the links of the nodes it usually sits in, and a pattern of its name in torch.

    torch_name is a regular expression for `torch.cuda.get_device_name()`; empty to match nothing.
    host: between the device and the memory of its host. storage: to the file system, for checkpoints.
    By default they are assumed, and their `source` says so.
    """

    device: Device
    intra_node: Link
    inter_node: Link
    torch_name: str = ""
    host: Link = ASSUMED_HOST
    storage: Link = ASSUMED_STORAGE

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", host_of(self.device, self.host))

    @staticmethod
    def load(path: str | Path) -> DeviceSheet:
        """Reads a device file, strictly; raises BadInput that names the file and the key."""
        return from_json(DeviceSheet, read_json(path), str(path))

    def save(self, path: str | Path) -> None:
        write_json(to_json(self), path)


def host_of(device: Device, host: Link) -> Link:
    """`host`, unless nothing was said about the host link of a CPU: then a copy in its own memory."""
    return ASSUMED_CPU_HOST if device.kind == "cpu" and host == ASSUMED_HOST else host


@memoize
def builtin_devices() -> tuple[str, ...]:
    """Names of the built-in devices, cpu first."""
    return tuple(sorted((p.stem for p in DATA.glob("*.json")), key=lambda name: (name != "cpu", name)))


@memoize
def builtin_sheet(name: str) -> DeviceSheet:
    """The built-in device file of that name; raises BadInput that lists them."""
    if name not in builtin_devices():
        raise BadInput(
            f"unknown device {shortened(name)!r}{did_you_mean(name)}",
            "cluster",
            f"built-in devices: {', '.join(builtin_devices())}; or the path of a device file (.json)",
        )
    return DeviceSheet.load(DATA / f"{name}.json")


def did_you_mean(name: str, prefix: str = "") -> str:
    """`; did you mean h100-80g?`, after `prefix`: the devices whose names begin so, else those that are spelled alike."""
    plain = re.sub(r"[\s_]", "-", name.strip().lower())
    known = builtin_devices()
    alike = [each for each in known if plain and each.startswith(plain)] or difflib.get_close_matches(plain, known, 1, 0.75)
    return f"; did you mean {' or '.join(prefix + each for each in alike)}?" if alike else ""


def sheet_for_torch_name(torch_name: str) -> DeviceSheet | None:
    """The built-in device file whose pattern is found in a `torch.cuda.get_device_name()`, or None."""
    sheets = [builtin_sheet(name) for name in builtin_devices()]
    return next((s for s in sheets if s.torch_name and re.search(s.torch_name, torch_name)), None)
