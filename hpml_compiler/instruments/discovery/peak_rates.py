"""Quick benchmarks of one GPU or one core that correct a device's rates: a matmul per dtype, and an addition.

Each is the least time of repeated runs, on a CPU with one thread: several threads would wait for each other on a busy
machine. A device is corrected so that the roofline predicts the measured times at the measured sizes; the efficiency curves
stay.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from passes.cost_model import RooflineCost
from passes.hardware.device import Device
from passes.hardware.mesh import Mesh
from passes.json_records import FrozenMap

SECONDS = 0.7  # per measurement; there are at most four


@dataclass(frozen=True)
class MeasuredKernel:
    """Benchmark result of one kernel: its least time on one GPU or one core."""

    kind: str
    dtype: str
    flops: float
    bytes_moved: float
    us: float

    def __str__(self) -> str:
        if self.kind == "matmul":
            return f"matrix product in {self.dtype}: {self.flops / self.us / 1e3:,.0f} GFLOP/s"
        return f"addition in {self.dtype}: {self.bytes_moved / self.us / 1e3:,.1f} GB/s"


def measure(device_type: str, seconds: float = SECONDS) -> list[MeasuredKernel]:
    """Benchmark a matmul per dtype, and an addition too large for the caches."""
    import torch

    cuda = device_type == "cuda"
    n, elements = (8192, 2**29) if cuda else (512, 2**25)
    found = []
    with _one_thread(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, *(() if cuda else (torch.float64,))):
            left, out = torch.randn(n, n, device=device_type).to(dtype), torch.empty(n, n, dtype=dtype, device=device_type)
            us = _best_us(lambda left=left, out=out: torch.mm(left, left, out=out), cuda, seconds)
            moved = 3.0 * n * n * left.element_size()
            found.append(MeasuredKernel("matmul", str(dtype).removeprefix("torch."), 2.0 * n**3, moved, us))
        x, y = torch.ones(elements, device=device_type), torch.empty(elements, device=device_type)
        us = _best_us(lambda: torch.add(x, 1.0, out=y), cuda, seconds)
        found.append(MeasuredKernel("pointwise", "float32", float(elements), 8.0 * elements, us))
    return found


def corrected(device: Device, measured: list[MeasuredKernel]) -> Device:
    """Correct a device so that its predictions for the measured kernels equal the measurements.

    For a CPU, peaks and bandwidth are scaled. A GPU's are those of its data sheet: its efficiencies are scaled instead, by
    the bfloat16 matmul (else the first one), and stay in (0, 1].
    """
    cost = RooflineCost(device, Mesh((), device))
    launch_us = device.launch_latency_us
    gain = {}
    for each in measured:
        predicted_us = cost.compute_us(each.flops, each.bytes_moved, each.dtype, each.kind) - launch_us
        gain[each.kind, each.dtype] = predicted_us / max(each.us - launch_us, 0.1 * each.us)
    products = {dtype: ratio for (kind, dtype), ratio in gain.items() if kind == "matmul"}
    memory = next((ratio for (kind, _), ratio in gain.items() if kind == "pointwise"), 1.0)
    if device.kind == "cuda":
        product = products.get("bfloat16", next(iter(products.values()), 1.0))
        return replace(
            device, matmul_efficiency=min(1.0, device.matmul_efficiency * product),
            memory_efficiency=min(1.0, device.memory_efficiency * memory), source=_source(device, measured),
        )
    peaks = {dtype: device.peak(dtype) * ratio for dtype, ratio in products.items()}
    return replace(
        device, peak_flops_per_s=FrozenMap({**device.peak_flops_per_s, **peaks}),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * memory, source=_source(device, measured),
    )


def _source(device: Device, measured: list[MeasuredKernel]) -> str:
    return f"measured here: {'; '.join(map(str, measured))}; else: {device.source}"


def _best_us(call: Callable[[], object], cuda: bool, seconds: float) -> float:
    import torch

    best, end = float("inf"), time.perf_counter() + seconds
    call()
    while time.perf_counter() < end or best == float("inf"):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) * 1e6)
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
