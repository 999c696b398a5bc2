"""Efficiency curves: the fraction of a device's peak arithmetic rate and of memory bandwidth, by kernel size and cache.

Arithmetic of F FLOPs on B bytes of `s`-byte elements, with R = peak · efficiency the rate of large kernels:

    arithmetic_us = ramp_us + (F + 2·half_dim/s · B) / R                                              (1)

which says that the efficiency saturates twice. In FLOPs, e(F) = e_max · F / (F + F_half) with F_half = ramp_us · R
(Hockney's half-performance length, "Parallel Computers 2", 1988); and in the dims: for a product of m x k and k x n,
F / B = 2/s · d with 1/d = 1/m + 1/n + 1/k, so that e(d) = e_max · d / (d + half_dim), where a thin product has d close
to its smallest dim. Attention over sequences of n has d = n / 2. Both terms grow with F and B, as prices must.

Memory traffic of B bytes takes B over the bandwidth of the level that holds them. A cache of C bytes serves everything that
fits; from C to 2·C its hit rate falls (data streamed through it twice is increasingly evicted), and the time
is interpolated linearly between the two bandwidths'. The result is a line per segment, computed once per device.
"""
from __future__ import annotations

from typing import NamedTuple

from passes.cost_model.base import COMPUTE_KINDS
from passes.hardware.device import Device

_ITEM_BYTES = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "uint64": 8, "complex32": 4, "bcomplex32": 4, "float32": 4,
    "tf32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
}


def item_bytes(dtype: str) -> int:
    """Bytes per element of a dtype, by torch's name of it, or of tf32; of floats and integers of 8 bits and of bool, 1."""
    return _ITEM_BYTES.get(dtype, 1)


class ArithmeticCurve(NamedTuple):
    """Equation (1) for one kind of kernel and dtype."""

    us_per_flop: float
    us_per_byte: float
    ramp_us: float


class MemorySegment(NamedTuple):
    """Memory time of up to `until_bytes` bytes: fixed_us + bytes · us_per_byte."""

    until_bytes: float
    fixed_us: float
    us_per_byte: float


def arithmetic(device: Device, kind: str, dtype: str) -> ArithmeticCurve:
    """The curve of a kind of `COMPUTE_KINDS`; raises ValueError on another."""
    if kind not in COMPUTE_KINDS:
        raise ValueError(f"unknown kind of kernel {kind!r}; legal kinds: {', '.join(COMPUTE_KINDS)}")
    if kind in ("matmul", "convolution"):
        efficiency, half_dim, ramp_us = device.matmul_efficiency, device.matmul_half_dim, device.matmul_ramp_us
    elif kind == "attention":
        efficiency, half_dim = device.attention_efficiency, device.attention_half_dim
        ramp_us = device.attention_ramp_us
    else:  # the vector units, in any dtype
        return ArithmeticCurve(1e6 / min(device.peak(dtype), device.peak("float32")), 0.0, 0.0)
    us_per_flop = 1e6 / (device.peak(dtype) * efficiency)
    return ArithmeticCurve(us_per_flop, 2 * half_dim / item_bytes(dtype) * us_per_flop, ramp_us)


def efficiency(device: Device, kind: str, dtype: str, flops: float, bytes_moved: float) -> float:
    """The fraction of the peak rate that the arithmetic of a kernel reaches (launch and memory traffic left out)."""
    curve = arithmetic(device, kind, dtype)
    us = curve.ramp_us + flops * curve.us_per_flop + bytes_moved * curve.us_per_byte
    return flops / us * 1e6 / device.peak(dtype) if us else 0.0


def memory_segments(device: Device) -> tuple[MemorySegment, ...]:
    """Lines of memory time over bytes, by ascending bytes; the last one has no end.

    A cache that is no faster than the level behind it is left out.
    """
    bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    caches = [cache for cache in device.caches if cache.bandwidth_bytes_per_s > bandwidth]
    slopes = [1e6 / cache.bandwidth_bytes_per_s for cache in caches] + [1e6 / bandwidth]
    segments = []
    for cache, fast, slow in zip(caches, slopes, slopes[1:], strict=False):
        size = float(cache.bytes)
        steep = 2 * slow - fast  # from (C, C·fast) to (2C, 2C·slow)
        segments += [MemorySegment(size, 0.0, fast), MemorySegment(2 * size, size * (fast - steep), steep)]
    return (*segments, MemorySegment(float("inf"), 0.0, slopes[-1]))
