"""Kernels of growing size: measured times against the roofline with its efficiency curves.

    python benchmarks/efficiency_curves.py [--device cpu] [--seconds 30]

Prints one JSON object: per kernel its kind, sizes, dtype, FLOPs, bytes, best measured and predicted µs; and per kind the
median of |predicted / measured - 1|. On a CPU one thread is used, since the built-in `cpu` is one core. "Best" is the
least of repeated runs: on a machine that does other work too, medians say how busy it was.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from passes.cost_model import RooflineCost
from passes.hardware.cluster import Cluster
from passes.hardware.device import sheet_for_torch_name
from passes.hardware.mesh import mesh_from_pin


@dataclass(frozen=True)
class Kernel:
    kind: str
    sizes: str
    dtype: str
    flops: float
    bytes_moved: float


def kernels(device: str) -> Iterator[tuple[Kernel, Callable[[], object]]]:
    """Square and thin matrix products, attention, and additions, with the call of each."""
    cuda = device == "cuda"
    dtypes = (torch.bfloat16, torch.float32) if cuda else (torch.float32,)
    for dtype in dtypes:
        squares = (256, 512, 1024, 2048, 4096, 8192) if cuda else (8, 16, 32, 64, 128, 256, 512, 1024)
        wide = 8192 if cuda else 768
        shapes = [(n, n, n) for n in squares] + [(m, wide, wide) for m in (1, 4, 16, 64, 256)]
        shapes += [(wide, 16, wide), (wide, wide, 16), (64, 256, 768), (256, 1024, 256)]
        for m, n, k in shapes:
            left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
            moved = (m * k + k * n + m * n) * left.element_size()
            yield (Kernel("matmul", f"{m}x{n}x{k}", str(dtype)[6:], 2.0 * m * n * k, moved),
                   lambda left=left, right=right: left @ right)
        batch, heads, dim = (4, 16, 128) if cuda else (2, 4, 32)
        for length in (128, 512, 2048, 8192) if cuda else (16, 64, 256, 1024):
            q = torch.randn(batch, heads, length, dim, device=device, dtype=dtype)
            yield (Kernel("attention", f"{batch}x{heads}x{length}x{dim}", str(dtype)[6:],
                          4.0 * batch * heads * length**2 * dim, 4 * q.numel() * q.element_size()),
                   lambda q=q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    for power in range(10, 29 if cuda else 26, 2 if cuda else 1):
        x = torch.randn(2**power, device=device)
        y = torch.empty(2**power, device=device)  # written again and again: what fresh pages cost is another matter
        yield (Kernel("pointwise", f"{2**power}", "float32", float(2**power), 8.0 * 2**power),
               lambda x=x, y=y: torch.add(x, x, out=y))


def best_us(call: Callable[[], object], device: str, seconds: float) -> float:
    """Least time of one call: of rounds of calls that take a millisecond or more each."""
    def round_us(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / calls

    round_us(2)
    calls = max(1, int(2000 / round_us(2)))
    best, end = round_us(calls), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, round_us(calls))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=30.0, help="in all, shared by the kernels")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        sheet = sheet_for_torch_name(torch.cuda.get_device_name())
        name = sheet.device.name if sheet else "a100-40g"
    else:
        name = "cpu"
    mesh = mesh_from_pin({}, Cluster.parse(f"1x1:{name}"))
    cost = RooflineCost(mesh.device, mesh)
    found = list(kernels(args.device))
    rows = []
    with torch.no_grad():
        for kernel, call in found:
            measured = best_us(call, args.device, args.seconds / len(found))
            predicted = cost.compute_us(kernel.flops, kernel.bytes_moved, kernel.dtype, kernel.kind)
            rows.append({**asdict(kernel), "measured_us": round(measured, 2), "predicted_us": round(predicted, 2),
                         "ratio": round(predicted / measured, 3)})
    kinds = sorted({row["kind"] for row in rows})
    errors = {kind: statistics.median(abs(row["ratio"] - 1) for row in rows if row["kind"] == kind) for kind in kinds}
    print(json.dumps({"benchmark": "efficiency_curves", "device": name, "torch": torch.__version__, "rows": rows,
                      "median_error": errors}))


if __name__ == "__main__":
    main()
