from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.cost_model import COMPUTE_KINDS, CostModel, OptimizerModel, RooflineCost, collective_us
from passes.hardware.cluster import Cluster, builtin_devices
from passes.hardware.mesh import enumerate_meshes


def roofline(text: str, optimizer: OptimizerModel | None = None) -> RooflineCost:
    mesh = enumerate_meshes(Cluster.parse(text))[0]
    return RooflineCost(mesh.device, mesh, optimizer or OptimizerModel())


H100: CostModel = roofline("1x8:h100-80g")


def test_large_matrix_product_is_bound_by_arithmetic():
    n = 8192
    us = H100.compute_us(2 * n**3, 3 * 2 * n**2, "bfloat16", "matmul")
    assert us == pytest.approx(2 * n**3 / (989.4e12 * 0.7) * 1e6, rel=0.03)
    assert us > 5 * H100.compute_us(n**2, 3 * 2 * n**2, "bfloat16", "pointwise")


def test_pointwise_is_bound_by_memory_and_fusion_saves_bytes():
    one = H100.compute_us(2**28, 2 * 2**30, "float32", "pointwise")
    assert one == pytest.approx(2 * 2**30 / (3350e9 * 0.9) * 1e6, rel=0.01)
    assert H100.compute_us(2 * 2**28, 2 * 2**30, "float32", "pointwise") < 2 * one  # two ops as one kernel


def test_tiny_kernels_cost_their_launch_and_views_nothing():
    assert H100.compute_us(1, 4, "float32", "pointwise") == pytest.approx(2.0, rel=1e-3)
    assert H100.compute_us(0, 0, "float32", "view") == 0
    assert H100.compute_us(0, 2**30, "float32", "view") == 0


def test_rates_follow_the_dtype():
    def flops_us(text: str, dtype: str, kind: str) -> float:
        return roofline(text).compute_us(1e13, 1.0, dtype, kind)

    a100 = "1x8:a100-80g"
    assert flops_us(a100, "float32", "matmul") == pytest.approx(16 * flops_us(a100, "bfloat16", "matmul"), rel=1e-3)
    assert flops_us(a100, "tf32", "matmul") == pytest.approx(2 * flops_us(a100, "bfloat16", "matmul"), rel=1e-3)
    # no tensor cores for what is no matrix product; attention is less efficient than a matrix product
    assert flops_us(a100, "bfloat16", "embedding") == pytest.approx(flops_us(a100, "float32", "embedding"))
    assert flops_us(a100, "bfloat16", "attention") > flops_us(a100, "bfloat16", "convolution")
    v100 = "1x8:v100-32g"
    assert flops_us(v100, "bfloat16", "matmul") == pytest.approx(flops_us(v100, "float32", "matmul"))


def test_unknown_kind_is_refused():
    for _ in range(2):  # the second call must not find the first in a cache
        with pytest.raises(ValueError, match="legal kinds: matmul"):
            H100.compute_us(1, 1, "float32", "softmax")


@given(
    st.sampled_from(builtin_devices()),
    st.sampled_from([k for k in COMPUTE_KINDS if k != "view"]),
    st.sampled_from(["float32", "bfloat16", "float16", "int64", "bool"]),
    *[st.floats(0, 1e15)] * 4,
)
def test_compute_is_positive_and_monotone(device, kind, dtype, a, b, c, d):
    cost = roofline(f"1x2:{device}")
    (less_flops, more_flops), (less_bytes, more_bytes) = sorted((a, b)), sorted((c, d))
    less = cost.compute_us(less_flops, less_bytes, dtype, kind)
    assert 0 < less <= cost.compute_us(more_flops, more_bytes, dtype, kind)


def test_collective_is_one_more_kernel():
    axis = enumerate_meshes(Cluster.parse("1x8:h100-80g"))[0].axes[0]
    assert H100.collective_us("all_reduce", axis, 1e6) == collective_us("all_reduce", axis, 1e6) + 2.0
    alone = roofline("1x1:cpu")
    assert alone.mesh.axes == ()


def test_optimizer_moves_its_bytes():
    # AdamW on float32, fused: parameter and two moments read and written, gradient read: 7 floats
    fused = OptimizerModel(fused=True)
    assert fused.traffic_bytes(temporaries_in_cache=False) == 28
    assert roofline("1x1:h100-80g", fused).optimizer_us(1e9) == pytest.approx(28e9 / (3350e9 * 0.9) * 1e6)
    # op by op: 20 floats, of which 6 are the denominator
    assert OptimizerModel().traffic_bytes(temporaries_in_cache=False) == 80
    assert OptimizerModel().traffic_bytes(temporaries_in_cache=True) == 56
    assert roofline("1x1:cpu").optimizer_us(0) == 0


def test_calls_are_cheap():
    axis = enumerate_meshes(Cluster.parse("8x8:h100-80g"))[0].axes[0]
    calls = 2000
    for call in (
        lambda: H100.compute_us(1e9, 1e6, "bfloat16", "matmul"),
        lambda: H100.collective_us("all_reduce", axis, 1e6),
        lambda: H100.optimizer_us(1e6),
    ):
        best_us = min(timeit.repeat(call, number=calls, repeat=5)) / calls * 1e6
        assert best_us < 10  # about 1 here; five times the goal of 2, for slow machines
