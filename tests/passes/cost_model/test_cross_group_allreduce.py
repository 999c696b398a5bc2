"""Adding up gradients between groups: sizes and links before -> µs and joules worked out by hand."""
from __future__ import annotations

from dataclasses import replace

import pytest

from passes.cost_model.cross_group_allreduce import groups_axis, mixed_energy_j, sum_between_groups_us
from passes.hardware.cluster import Cluster, NodeGroup
from passes.hardware.device import builtin_sheet
from passes.hardware.link import Link

LINK = Link("wire", latency_us=5.0, bandwidth_bytes_per_s=10e9, energy_j_per_byte=1e-9)


def cluster(*sizes: tuple[int, int], link: Link = LINK) -> Cluster:
    sheets = [builtin_sheet(name) for name in ("h100-80g", "v100-32g", "l4-24g")]
    groups = [NodeGroup.of(nodes, devices, sheet) for (nodes, devices), sheet in zip(sizes, sheets, strict=False)]
    return Cluster(tuple(groups), between_groups=link)


def test_two_groups_exchange_all_bytes_once_through_the_ports_of_the_smaller():
    # ring of 2: reduce_scatter and all_gather of half the bytes each, 4 ports of 10 GB/s
    us = sum_between_groups_us(cluster((1, 4), (1, 8)), (0, 1), 4e6)
    assert us == pytest.approx(2 * 5.0 + 4e6 / 40e9 * 1e6)


def test_a_port_that_a_node_shares_counts_once_per_node():
    shared = replace(LINK, shared_by=8)
    assert groups_axis(cluster((2, 8), (2, 8), link=shared), (0, 1)).bandwidth_bytes_per_s == pytest.approx(20e9)


def test_the_group_with_the_narrowest_way_out_sets_the_pace_if_it_takes_part():
    three = cluster((1, 8), (1, 8), (1, 1))
    assert groups_axis(three, (0, 1)).bandwidth_bytes_per_s == pytest.approx(80e9)
    assert groups_axis(three, (0, 1, 2)).bandwidth_bytes_per_s == pytest.approx(10e9)
    assert sum_between_groups_us(three, (0, 1, 2), 1e6) > sum_between_groups_us(three, (0, 1), 1e6)


def test_one_group_has_nothing_to_add():
    assert sum_between_groups_us(cluster((1, 4), (1, 4)), (1,), 1e9) == 0.0


def test_energy_counts_waiting_adding_up_and_the_link():
    both = cluster((1, 2), (1, 1))
    fast, slow = (group.device for group in both.groups)
    adding_s = sum_between_groups_us(both, (0, 1), 1e6) * 1e-6
    communication = [d.idle_power_w + 0.3 * (d.busy_power_w - d.idle_power_w) for d in (fast, slow)]
    expected = 3.0 + 2.0 + 2 * 400e-6 * fast.idle_power_w  # the fast group waits 400 us for the slow one
    expected += adding_s * (2 * communication[0] + communication[1])
    expected += 2 * 1e6 * 1e-9  # each of two groups sends 1 MB
    assert mixed_energy_j(both, [3.0, 2.0], [600.0, 1000.0], 1e6) == pytest.approx(expected)


def test_a_group_that_is_left_out_idles():
    both = cluster((1, 2), (1, 4))
    idle = both.groups[1].device.idle_power_w
    assert mixed_energy_j(both, [3.0, 0.0], [600.0, 0.0], 1e6) == pytest.approx(3.0 + 4 * 600e-6 * idle)
