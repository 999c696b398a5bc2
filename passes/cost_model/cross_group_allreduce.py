"""Cost of the gradient all_reduce between groups of unlike devices, with the groups as its members.

Every device of a group takes part with its own piece of the gradients: a parameter that the group shards is on
one device; a replicated one is cut, and each replica reduces a piece. (Where the group reduces a gradient over its
own devices, that all_reduce is then cut in the middle: reduce_scatter, this reduction of the pieces, all_gather. So it costs
no more inside the group.) All ports of a group are busy at once, and the group with the fewest bytes per second sets
the pace:

    bandwidth = min over groups of  devices · link.device_bytes_per_s(devices per node)

While a group waits for another, its devices draw their idle power; so do those of an unused group.
"""
from __future__ import annotations

from collections.abc import Sequence

from passes.cost_model.collective_costs import collective_us
from passes.cost_model.energy_model import Power, link_j
from passes.hardware.cluster import Cluster
from passes.hardware.link import BOARD_J_PER_BYTE, SYSTEM_J_PER_BYTE
from passes.hardware.mesh import MeshAxis


def groups_axis(cluster: Cluster, active: Sequence[int]) -> MeshAxis:
    """An axis whose members are these groups, two or more, priced by `Cluster.between_groups`."""
    link = cluster.between_groups
    assert link is not None, "a cluster of several groups has a link between them"
    groups = [cluster.groups[g] for g in active]
    bandwidth = min(group.size * link.device_bytes_per_s(group.devices_per_node) for group in groups)
    joules = link.energy_j_per_byte
    if joules is None:
        joules = BOARD_J_PER_BYTE if cluster.same_node else SYSTEM_J_PER_BYTE
    return MeshAxis("groups", len(groups), link.latency_us, bandwidth, (), link.slowdown, joules)


def sum_between_groups_us(cluster: Cluster, active: Sequence[int], nbytes: float) -> float:
    """µs to reduce `nbytes` of gradients, counted once for the whole model; 0 with fewer than two groups."""
    if len(active) < 2:
        return 0.0
    return collective_us("all_reduce", groups_axis(cluster, active), nbytes)


def sum_between_groups_j(cluster: Cluster, active: Sequence[int], nbytes: float) -> float:
    """Joules on the links between groups for that reduction."""
    if len(active) < 2:
        return 0.0
    return len(active) * link_j("all_reduce", groups_axis(cluster, active), nbytes)


def mixed_energy_j(cluster: Cluster, energies_j: Sequence[float], times_us: Sequence[float], nbytes: float) -> float:
    """Joules of one step on all devices: for each group, its own part of the step (`energies_j`, `times_us`;
    0 and 0 for an unused group), waiting for the slowest, and reducing `nbytes` of gradients with the others."""
    active = [g for g, time_us in enumerate(times_us) if time_us]
    together_us = sum_between_groups_us(cluster, active, nbytes)
    step_us = max(times_us) + together_us
    total = sum(energies_j)
    for g, group in enumerate(cluster.groups):
        power = Power.of(group.device)
        adding_us = together_us if g in active else 0.0
        waiting_us = step_us - times_us[g] - adding_us
        total += group.size * 1e-6 * (waiting_us * power.idle_w + adding_us * power.communication_w)
    return total + sum_between_groups_j(cluster, active, nbytes)
