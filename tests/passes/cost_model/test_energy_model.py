"""A device and a power cap -> its speed and power; times -> energies."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.cost_model import RooflineCost
from passes.cost_model.base import COLLECTIVE_KINDS
from passes.cost_model.cost_terms import copy
from passes.cost_model.energy_model import EnergyPrices, Power, capped, capped_cluster, link_j, sent_bytes
from passes.errors import BadInput
from passes.hardware.cluster import Cluster, builtin_sheet
from passes.hardware.device import Device
from passes.hardware.link import BOARD_J_PER_BYTE, SYSTEM_J_PER_BYTE
from passes.hardware.mesh import Mesh, MeshAxis, price_axis
from tests.passes.graphs import Prices

A100 = builtin_sheet("a100-80g").device
DEVICE = Device("d", "cuda", 2**30, 1e12, {"float32": 1e12}, 1e-6, 100.0, 500.0, "test", memory_power_w=300.0,
                communication_power_w=150.0)
EMPTY = Mesh((), DEVICE)


def matmul_us(device: Device, flops: float = 1e12) -> float:
    return RooflineCost(device, EMPTY).compute_us(flops, 0.0, "float32", "matmul")


def copy_us(device: Device, nbytes: float = 1e12) -> float:
    return RooflineCost(device, EMPTY).compute_us(0.0, nbytes, "float32", "pointwise")


# --- powers -----------------------------------------------------------------------------------------------------------


def test_powers_are_those_of_the_device_or_shares_of_its_busy_power():
    assert Power.of(DEVICE) == Power(500.0, 300.0, 150.0, 100.0)
    silent = Power.of(replace(DEVICE, memory_power_w=None, communication_power_w=None))
    assert 100 < silent.communication_w < silent.memory_w < silent.arithmetic_w == 500
    assert silent.kernel_w("attention") == 500 and silent.kernel_w("embedding") == silent.memory_w


@pytest.mark.parametrize("watts", [99.0, 501.0, -1.0])
def test_powers_outside_of_idle_and_busy_are_refused(watts):
    with pytest.raises(BadInput, match="between idle_power_w and busy_power_w"):
        replace(DEVICE, memory_power_w=watts)


# --- caps -------------------------------------------------------------------------------------------------------------


def test_an_eighth_of_the_dynamic_power_halves_the_clock():
    slow = capped(DEVICE, 100 + 400 / 8)
    assert matmul_us(slow) == pytest.approx(2 * matmul_us(DEVICE), rel=1e-9)
    assert Power.of(slow) == Power(150.0, 150.0, 150.0, 100.0)


def test_memory_is_as_fast_as_ever_until_the_cap_reaches_its_power_and_then_proportional():
    assert copy_us(capped(DEVICE, 300.0)) == copy_us(DEVICE)
    assert Power.of(capped(DEVICE, 300.0)).memory_w == 300
    assert copy_us(capped(DEVICE, 200.0)) == pytest.approx(2 * copy_us(DEVICE), rel=1e-9)
    dynamic_j = [copy_us(d) * (Power.of(d).memory_w - 100) for d in (DEVICE, capped(DEVICE, 200), capped(DEVICE, 120))]
    assert dynamic_j == pytest.approx([dynamic_j[0]] * 3, rel=1e-9)


def test_a_cap_that_does_not_bind_changes_nothing_and_one_that_leaves_nothing_is_refused():
    assert capped(DEVICE, 500.0) is DEVICE and capped(DEVICE, 1e6) is DEVICE
    for watts in (100.0, 50.0, 0.0, -5.0, math.nan):
        with pytest.raises(BadInput, match="leaves nothing to compute with"):
            capped(DEVICE, watts)


watts_between = st.floats(56.0, 399.0)


@given(watts_between, watts_between)
def test_less_power_is_never_faster_and_the_lower_of_two_caps_counts(one, other):
    low, high = sorted((one, other))
    weak, strong = capped(A100, low), capped(A100, high)
    assert matmul_us(weak) >= matmul_us(strong) >= matmul_us(A100)
    assert copy_us(weak) >= copy_us(strong) >= copy_us(A100)
    assert max(vars(Power.of(weak)).values()) <= low * (1 + 1e-12)
    both = capped(strong, low)
    assert both.peak("bfloat16") == pytest.approx(weak.peak("bfloat16"), rel=1e-9)
    assert both.memory_bandwidth_bytes_per_s == pytest.approx(weak.memory_bandwidth_bytes_per_s, rel=1e-9)
    assert Power.of(both).memory_w == pytest.approx(Power.of(weak).memory_w)


def test_an_operation_takes_least_energy_at_one_and_a_half_times_the_idle_power():
    # t ~ 1/f and P = idle + k·f³, so the energy idle/f + k·f² is least where k·f³ = idle/2
    energies = {watts: matmul_us(capped(DEVICE, watts)) * watts for watts in range(110, 500)}
    assert min(energies, key=energies.__getitem__) == 150


def test_a_cluster_is_capped_device_by_device():
    cluster = Cluster.parse("2x4:a100-80g")
    assert capped_cluster(cluster, None) is cluster
    assert capped_cluster(cluster, 200.0).device == capped(A100, 200.0)
    assert (capped_cluster(cluster, 200.0).world_size, str(capped_cluster(cluster, 200.0))) == (8, str(cluster))
    mixed = Cluster.parse("1x4:a100-80g+1x4:l4-24g")
    assert [g.device.busy_power_w for g in capped_cluster(mixed, 200.0).groups] == [
        200.0, builtin_sheet("l4-24g").device.busy_power_w]


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_bytes_sent_are_those_of_a_ring(kind, rounds, size):
    part = 10.0  # in each of size - 1 steps of a round, every rank passes one part on
    assert sent_bytes(kind, size, part * size) == pytest.approx(rounds * (size - 1) * part)


def test_other_collectives_send_what_others_need_and_one_rank_sends_nothing():
    assert sent_bytes("all_to_all", 4, 100.0) == 75.0
    assert sent_bytes("send_recv", 4, 100.0) == 100.0
    assert {sent_bytes(kind, 1, 100.0) for kind in COLLECTIVE_KINDS} == {0.0}
    with pytest.raises(ValueError, match="legal kinds"):
        sent_bytes("gossip", 4, 1.0)


def test_hops_cost_what_the_links_say_or_what_is_assumed_of_their_level():
    cluster = Cluster.parse("2x4:a100-80g")
    assert price_axis("x", 4, 1, cluster).energy_j_per_byte == BOARD_J_PER_BYTE
    assert price_axis("x", 2, 4, cluster).energy_j_per_byte == SYSTEM_J_PER_BYTE
    both = price_axis("x", 8, 1, cluster)  # a ring of 8 leaves a node twice
    assert both.energy_j_per_byte == pytest.approx((2 * SYSTEM_J_PER_BYTE + 6 * BOARD_J_PER_BYTE) / 8)
    group = cluster.group
    told = replace(cluster, groups=(replace(group, intra_node=replace(group.intra_node, energy_j_per_byte=1e-9)),))
    assert link_j("all_reduce", price_axis("x", 4, 1, told), 1e9) == pytest.approx(1.5)
    with pytest.raises(BadInput, match="energy_j_per_byte"):
        replace(group.intra_node, energy_j_per_byte=-1.0)


# --- prices -----------------------------------------------------------------------------------------------------------


def test_energy_is_time_by_power_and_bytes_by_link():
    mesh = Mesh((MeshAxis("x", 4, 1.0, 1e9, energy_j_per_byte=2e-6),), DEVICE)
    times = Prices()
    energy = EnergyPrices(times, mesh)
    assert energy.kernel(100.0, 1.0, "float32", "matmul") == times.kernel(100.0, 1.0, "float32", "matmul") * 500
    assert energy.kernel(1.0, 9.0, "float32", "softmax") == times.kernel(1.0, 9.0, "float32", "softmax") * 300
    assert copy(7.0, energy) == copy(7.0, times) * 300
    assert energy.update(7.0, "float32") == times.update(7.0, "float32") * 300
    assert energy.collective("all_gather", 0, 8.0) == pytest.approx(
        times.collective("all_gather", 0, 8.0) * 150 + 6.0 * 2.0)  # W·µs, and 6 B of 2 µJ
