from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.cost_model import COLLECTIVE_KINDS, collective_lines, collective_us
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import AxisLevel, MeshAxis, enumerate_meshes, mesh_from_pin
from passes.json_records import FrozenMap

KINDS = st.sampled_from(COLLECTIVE_KINDS)
LEVELS = st.builds(AxisLevel, st.integers(2, 40), st.floats(0.1, 1e3), st.floats(1e8, 1e12))
FLAT = LEVELS.map(lambda level: MeshAxis("x", level.size, level.latency_us, level.bandwidth_bytes_per_s))


@st.composite
def spanning(draw) -> MeshAxis:
    inner, outer = draw(LEVELS), draw(LEVELS)
    size = inner.size * outer.size
    latency_us = (outer.size * outer.latency_us + (size - outer.size) * inner.latency_us) / size
    bandwidth = min(inner.bandwidth_bytes_per_s, outer.bandwidth_bytes_per_s * inner.size)
    return MeshAxis("x", size, latency_us, bandwidth, (inner, outer))


AXES = st.one_of(FLAT, spanning())
BYTES = st.floats(0, 1e12)


@given(KINDS, AXES, BYTES, BYTES)
def test_costs_are_positive_and_monotone_in_bytes(kind, axis, a, b):
    less, more = sorted((a, b))
    assert 0 < collective_us(kind, axis, less) <= collective_us(kind, axis, more)
    if more > 2 * less and more > 1e9:
        assert collective_us(kind, axis, less) < collective_us(kind, axis, more)


@given(KINDS, AXES, BYTES)
def test_cost_is_the_cheapest_line(kind, axis, nbytes):
    lines = [fixed + nbytes * per_byte for fixed, per_byte in collective_lines(kind, axis)]
    assert collective_us(kind, axis, nbytes) == min(lines)


def step_by_step_us(transfers: list[float], latency_us: float, bandwidth: float) -> float:
    """Rounds one after another, each a message of so many bytes from every rank."""
    return sum(latency_us + nbytes / bandwidth * 1e6 for nbytes in transfers)


@given(st.integers(2, 40), st.floats(0.1, 1e3), st.floats(1e8, 1e12), st.floats(0, 1e10))
def test_flat_costs_against_the_rounds_of_each_algorithm(n, alpha, bandwidth, nbytes):
    axis = MeshAxis("x", n, alpha, bandwidth)

    def rounds(*transfers: float) -> float:
        return step_by_step_us(list(transfers), alpha, bandwidth)

    ring = rounds(*[nbytes / n] * (n - 1))
    doubling = ceil(log2(n))
    assert collective_us("all_gather", axis, nbytes) == pytest.approx(ring)
    assert collective_us("reduce_scatter", axis, nbytes) == pytest.approx(ring)
    assert collective_us("send_recv", axis, nbytes) == pytest.approx(rounds(nbytes))
    bruck = rounds(*[nbytes / 2] * doubling)
    assert collective_us("all_to_all", axis, nbytes) == pytest.approx(min(ring, bruck))
    chain = (n - 1) * alpha + nbytes / bandwidth * 1e6
    assert collective_us("broadcast", axis, nbytes) == pytest.approx(min(chain, rounds(*[nbytes] * doubling)))
    tree = 2 * (doubling * alpha + nbytes / bandwidth * 1e6)
    assert collective_us("all_reduce", axis, nbytes) == pytest.approx(min(2 * ring, tree))


def test_small_all_reduce_takes_the_tree_and_large_the_ring():
    axis = MeshAxis("x", 32, 5.0, 1e11)
    assert collective_us("all_reduce", axis, 8) == pytest.approx(2 * 5 * 5.0, rel=1e-3)
    assert collective_us("all_reduce", axis, 1e10) == pytest.approx(2 * 31 / 32 * 1e10 / 1e11 * 1e6, rel=1e-2)


@given(AXES, BYTES)
def test_all_reduce_is_no_dearer_than_its_two_halves(axis, nbytes):
    halves = collective_us("reduce_scatter", axis, nbytes) + collective_us("all_gather", axis, nbytes)
    assert collective_us("all_reduce", axis, nbytes) <= halves * (1 + 1e-9)


@given(st.integers(2, 40), st.integers(2, 40), st.floats(1e6, 1e10))
def test_sharded_twice_as_far_all_gather_costs_more(n, k, nbytes):
    small, large = MeshAxis("x", n, 1.0, 1e10), MeshAxis("x", n * k, 1.0, 1e10)
    assert collective_us("all_gather", small, nbytes) < collective_us("all_gather", large, nbytes)


@given(spanning(), st.floats(0, 1e10))
def test_hierarchical_all_gather_against_its_two_phases(axis, nbytes):
    """Across nodes every device gathers its 1/g of the bytes, inside the node the whole."""
    inner, outer = axis.levels
    across = step_by_step_us(
        [nbytes / axis.size] * (outer.size - 1), outer.latency_us, outer.bandwidth_bytes_per_s
    )
    inside = step_by_step_us(
        [nbytes / inner.size] * (inner.size - 1), inner.latency_us, inner.bandwidth_bytes_per_s
    )
    ring = step_by_step_us([nbytes / axis.size] * (axis.size - 1), axis.latency_us, axis.bandwidth_bytes_per_s)
    for kind in ("all_gather", "reduce_scatter"):
        assert collective_us(kind, axis, nbytes) == pytest.approx(min(ring, across + inside))


def test_hierarchical_wins_for_small_tensors_on_many_nodes():
    axis = enumerate_meshes(Cluster.parse("64x8:h100-80g"))[0].axes[0]
    (ring_fixed, ring_per_byte), (fixed, per_byte) = collective_lines("all_gather", axis)
    assert fixed < ring_fixed / 2 and per_byte > ring_per_byte
    assert collective_us("all_gather", axis, 1e4) == fixed + 1e4 * per_byte
    assert collective_us("all_gather", axis, 1e9) == ring_fixed + 1e9 * ring_per_byte


def test_all_to_all_across_nodes_is_bound_by_the_nics():
    axis = enumerate_meshes(Cluster.parse("8x8:h100-80g"))[0].axes[0]
    nic = axis.levels[1].bandwidth_bytes_per_s
    assert collective_us("all_to_all", axis, 1e9) == pytest.approx(56 / 64 * 1e9 / nic * 1e6, rel=0.01)
    # all_gather of the same tensor uses each NIC once for the node, not once for each device
    assert collective_us("all_gather", axis, 1e9) < collective_us("all_to_all", axis, 1e9) / 5


def test_axis_of_one_costs_nothing_and_unknown_kinds_are_refused():
    axis = mesh_from_pin({"dp": 1, "tp": 2}, Cluster.parse("1x2:cpu")).axis("dp")
    assert all(collective_us(kind, axis, 1e6) == 0 for kind in COLLECTIVE_KINDS)
    with pytest.raises(ValueError, match="all_gather, reduce_scatter"):
        collective_us("gather", axis, 1e6)


def test_slowdown_stretches_the_bytes_of_its_kind_only():
    plain, slow = MeshAxis("x", 4, 2.0, 1e9), MeshAxis("x", 4, 2.0, 1e9, (), FrozenMap(all_gather=3.0))
    [(fixed, per_byte)] = collective_lines("all_gather", plain)
    assert collective_lines("all_gather", slow) == ((fixed, 3 * per_byte),)
    assert collective_lines("all_reduce", slow) == collective_lines("all_reduce", plain)


# Published bus bandwidths of NCCL on 8 GPUs of one node, that is (n-1)/n·B/time of an all_gather:
# H100 370 GB/s (github.com/NVIDIA/nccl-tests/issues/212); A100 about 230 (the line rate of 300 less the same overhead).
@pytest.mark.parametrize(("device", "bus_bandwidth"), [("h100-80g", 370e9), ("a100-80g", 235e9)])
def test_bus_bandwidth_inside_a_node_is_what_nccl_reaches(device, bus_bandwidth):
    axis = enumerate_meshes(Cluster.parse(f"1x8:{device}"), max_axes=1)[0].axes[0]
    nbytes = 8e9
    found = 7 / 8 * nbytes / (collective_us("all_gather", axis, nbytes) * 1e-6)
    assert found == pytest.approx(bus_bandwidth, rel=0.1)


# Medians measured on gloo, 2 ranks over loopback (the cpu device file says how).
@pytest.mark.parametrize(
    ("kind", "nbytes", "low_ms", "high_ms"),
    [
        ("all_reduce", 2**18, 0.7, 1.2),
        ("all_reduce", 2**22, 3.9, 5.3),
        ("all_reduce", 2**26, 45, 75),
        ("all_gather", 2**26, 70, 135),
        ("reduce_scatter", 2**26, 84, 168),
        ("all_to_all", 2**26, 30, 40),
        ("broadcast", 2**26, 20, 34),
    ],
)
def test_gloo_on_one_host_is_within_what_was_measured(kind, nbytes, low_ms, high_ms):
    axis = enumerate_meshes(Cluster.parse("1x2:cpu"))[0].axes[0]
    assert low_ms <= collective_us(kind, axis, nbytes) / 1e3 <= high_ms
