"""Efficiency curves: known points of each, the limits, and that prices never fall as work grows."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.cost_model import RooflineCost
from passes.cost_model.efficiency_curves import efficiency, item_bytes, memory_segments
from passes.errors import BadInput
from passes.hardware.device import Cache, Device, builtin_devices, builtin_sheet
from passes.hardware.mesh import Mesh
from passes.json_records import FrozenMap

PLAIN = Device("plain", "cuda", 10**10, 1e12, FrozenMap(float32=1e13, bfloat16=1e14), 2.0, 10.0, 100.0, "made up")


def cost(device: Device) -> RooflineCost:
    return RooflineCost(device, Mesh((), device))


def product(m: int, n: int, k: int, itemsize: int = 2) -> tuple[float, float]:
    """FLOPs and bytes of a matrix product."""
    return 2.0 * m * n * k, float(itemsize * (m * k + k * n + m * n))


def test_elements_are_as_large_as_torch_says():
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)} - {torch.qint32, torch.bits16}
    assert {each: item_bytes(str(each).removeprefix("torch.")) for each in dtypes} == {each: each.itemsize for each in dtypes}


def test_without_curves_every_kernel_runs_at_the_rates_of_large_ones():
    flops, moved = product(64, 64, 64)
    assert efficiency(PLAIN, "matmul", "bfloat16", flops, moved) == pytest.approx(PLAIN.matmul_efficiency)
    assert efficiency(PLAIN, "attention", "bfloat16", flops, moved) == pytest.approx(PLAIN.attention_efficiency)
    assert cost(PLAIN).compute_us(0.0, 9e6, "float32", "pointwise") == pytest.approx(10.0 + 2.0)


def test_half_the_efficiency_at_the_half_performance_flops():
    device = replace(PLAIN, matmul_ramp_us=3.0)
    half_flops = 3e-6 * 1e14 * device.matmul_efficiency
    assert efficiency(device, "matmul", "bfloat16", half_flops, 0.0) == pytest.approx(device.matmul_efficiency / 2)
    assert efficiency(device, "matmul", "bfloat16", 1e6 * half_flops, 0.0) == pytest.approx(device.matmul_efficiency)
    assert efficiency(device, "attention", "bfloat16", half_flops, 0.0) == device.attention_efficiency


@pytest.mark.parametrize("dtype, itemsize", [("bfloat16", 2), ("float32", 4)])
def test_half_the_efficiency_at_the_half_dim_whichever_dim_is_thin(dtype, itemsize):
    device = replace(PLAIN, matmul_half_dim=64.0)
    wide = 10**6
    for shape in ((64, wide, wide), (wide, 64, wide), (wide, wide, 64), (192, 192, 192)):
        found = efficiency(device, "matmul", dtype, *product(*shape, itemsize))
        assert found == pytest.approx(device.matmul_efficiency / 2, rel=1e-3)
    thick = efficiency(device, "matmul", dtype, *product(wide, wide, wide, itemsize))
    assert thick == pytest.approx(device.matmul_efficiency, rel=1e-3)


def test_attention_over_twice_the_half_dim_has_half_the_efficiency():
    device = replace(PLAIN, attention_half_dim=128.0)
    batch, heads, length, dim = 4, 8, 256, 64
    flops, moved = 4.0 * batch * heads * length**2 * dim, 4.0 * 2 * batch * heads * length * dim
    assert efficiency(device, "attention", "bfloat16", flops, moved) == pytest.approx(device.attention_efficiency / 2)


def test_memory_time_by_cache_level():
    device = replace(PLAIN, caches=(Cache(10**6, 9e12), Cache(10**7, 3e12)))  # behind them 0.9 TB/s
    def us(moved: float) -> float:
        return cost(device).compute_us(0.0, moved, "float32", "pointwise") - device.launch_latency_us

    assert us(1e6) == pytest.approx(1e6 / 9e12 * 1e6)
    assert us(2e6) == pytest.approx(2e6 / 3e12 * 1e6)
    assert us(1.5e6) == pytest.approx((us(1e6) + us(2e6)) / 2)
    assert us(1e7) == pytest.approx(1e7 / 3e12 * 1e6)
    assert us(2e7) == pytest.approx(2e7 / 0.9e12 * 1e6)
    assert us(1e9) == pytest.approx(1e9 / 0.9e12 * 1e6)


def test_a_cache_that_is_no_faster_than_memory_is_left_out():
    assert memory_segments(replace(PLAIN, caches=(Cache(10**6, 0.5e12),))) == memory_segments(PLAIN)


@pytest.mark.parametrize("change", [
    {"matmul_ramp_us": -1.0},
    {"attention_half_dim": float("inf")},
    {"caches": (Cache(0, 1e12),)},
    {"caches": (Cache(10**6, 9e12), Cache(10**6 + 1, 3e12))},
    {"caches": (Cache(10**6, 3e12), Cache(10**7, 9e12))},
])
def test_a_device_refuses_impossible_curves(change):
    with pytest.raises(BadInput, match="device 'plain'"):
        replace(PLAIN, **change)


@pytest.mark.parametrize("name", builtin_devices())
@pytest.mark.parametrize("kind", ["matmul", "attention"])
def test_built_in_curves_reach_the_efficiency_of_large_kernels(name, kind):
    device = builtin_sheet(name).device
    limit = device.matmul_efficiency if kind == "matmul" else device.attention_efficiency
    assert efficiency(device, kind, "float32", 1e18, 1e9) == pytest.approx(limit, rel=1e-3)
    assert efficiency(device, kind, "float32", 1e6, 1e5) < 0.9 * limit
    huge = 1e13
    us = cost(device).compute_us(0.0, huge, "float32", "pointwise")
    assert huge / us * 1e6 == pytest.approx(device.memory_bandwidth_bytes_per_s * device.memory_efficiency, rel=1e-3)


@st.composite
def devices(draw) -> Device:
    levels = draw(st.integers(0, 3))
    caches = []
    size, rate = 1000, 1e14
    for _ in range(levels):
        size = int(size * draw(st.floats(2.001, 100)))
        rate *= draw(st.floats(0.01, 0.999))
        caches.append(Cache(size, rate))
    return replace(
        PLAIN, caches=tuple(caches), matmul_ramp_us=draw(st.floats(0, 100)), matmul_half_dim=draw(st.floats(0, 1000)),
        attention_ramp_us=draw(st.floats(0, 100)), attention_half_dim=draw(st.floats(0, 1000)),
    )


@given(devices(), st.sampled_from(["matmul", "attention", "pointwise"]), *[st.floats(0, 1e12)] * 4)
def test_prices_never_fall_as_flops_or_bytes_grow(device, kind, a, b, c, d):
    price = cost(device).compute_us
    (few, many), (light, heavy) = sorted((a, b)), sorted((c, d))
    slack = 1 + 1e-9
    assert price(few, light, "bfloat16", kind) <= price(many, light, "bfloat16", kind) * slack
    assert price(few, light, "bfloat16", kind) <= price(few, heavy, "bfloat16", kind) * slack


@given(devices(), st.floats(1, 1e12))
def test_memory_time_lies_between_the_fastest_and_the_slowest_level(device, moved):
    us = cost(device).compute_us(0.0, moved, "float32", "pointwise") - device.launch_latency_us
    fastest = max([cache.bandwidth_bytes_per_s for cache in device.caches] + [0.9e12])
    assert moved / fastest * 1e6 * (1 - 1e-6) - 1e-6 <= us <= moved / 0.9e12 * 1e6 * (1 + 1e-6) + 1e-6
