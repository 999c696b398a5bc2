"""Sweep of plans of one model over numbers of devices, power caps, meshes and objectives.

The model is traced once. Every plan is solved as usual with a pinned mesh, so each point is proven by the solver.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import nn

from hpml_compiler.instruments.energy_studies.pareto_front import InfeasiblePoint, ParetoPoint, Sweep
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.schema import Objective
from passes.cost_model.energy_model import capped_cluster
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster
from passes.hardware.device import Device
from passes.hardware.mesh import enumerate_meshes

CAP_STEPS = (0.85, 0.7, 0.55, 0.4)
"""Default power caps, as fractions of the busy power."""

MOST_COUNTS = 4
"""Default number of device counts: all, half of them, a quarter, ..."""


def default_caps(device: Device) -> list[float | None]:
    """None (no cap), then `CAP_STEPS` of the busy power, rounded to 5 W (0.1 W below 50 W), where feasible."""
    step = 5.0 if device.busy_power_w >= 50 else 0.1
    caps = [round(share * device.busy_power_w / step) * step for share in CAP_STEPS]
    return [None, *dict.fromkeys(cap for cap in caps if device.idle_power_w < cap < device.busy_power_w)]


def default_counts(cluster: Cluster) -> list[int]:
    """All devices, then repeatedly half of them while that fills whole nodes or fits into one."""
    counts = [cluster.world_size]
    while len(counts) < MOST_COUNTS and counts[-1] % 2 == 0 and _fits(cluster, counts[-1] // 2):
        counts.append(counts[-1] // 2)
    return counts


def part_of(cluster: Cluster, count: int) -> Cluster:
    """The first `count` devices of a cluster of equal nodes: whole nodes, or part of one. Raises BadInput."""
    group = cluster.group
    if count < 1 or count > group.size or not _fits(cluster, count):
        raise BadInput(f"{count} devices are no part of {cluster}", "devices",
                       f"give up to {group.devices_per_node}, or whole nodes of {group.devices_per_node} "
                       f"up to {group.size}")
    per_node = min(count, group.devices_per_node)
    return replace(cluster, groups=(replace(group, nodes=count // per_node, devices_per_node=per_node),))


def _fits(cluster: Cluster, count: int) -> bool:
    per_node = cluster.group.devices_per_node
    return count <= per_node or count % per_node == 0


def sweep(
    model: nn.Module, batch: Any, cluster: Cluster, options: Options | None = None, *,
    caps: Sequence[float | None] | None = None, counts: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Plan `model` on the global `batch` for every number of devices, cap, mesh and objective.

    caps: watts per device, None for no cap. counts: numbers of devices. Defaults are those of the functions above. A mesh
    pinned in `options` is the only one, with its number of devices. Infeasible plans are listed in `missed`. Raises
    BadInput, and Infeasible if no plan fits.
    """
    options = options or Options.parse(None)
    caps = default_caps(cluster.device) if caps is None else list(caps)
    for cap in caps:
        capped_cluster(cluster, cap)  # raises an error for a bad cap now, not after an hour
    counts = ([cluster.world_size] if options.mesh else default_counts(cluster)) if counts is None else list(counts)
    cases = [(count, mesh, cap, objective) for count in counts for mesh in _meshes(part_of(cluster, count), options)
             for cap, objective in itertools.product(caps, get_args(Objective))]
    traces = TracedModel(model, batch, options)
    points: list[ParetoPoint] = []
    missed: list[InfeasiblePoint] = []
    errors: list[Infeasible] = []
    for number, (count, mesh, cap, objective) in enumerate(cases):
        progress(f"plan {number + 1} of {len(cases)}")
        traces.options = options.model_copy(update={"mesh": mesh, "power_cap": cap, "objective": objective})
        try:
            points.append(pareto_point(plan_traces(traces, part_of(cluster, count)), cap))
        except Infeasible as error:
            errors.append(error)
            missed.append(InfeasiblePoint(count, mesh, cap, objective, str(error.what)))
    if not points:
        raise errors[0] if errors else BadInput("there is nothing to plan", "sweep", "give some caps and devices")
    return Sweep(str(cluster), tuple(points), tuple(missed))


def _meshes(cluster: Cluster, options: Options) -> list[dict[str, int] | None]:
    """All meshes with one or two axes, or the pinned one; None for one device."""
    if options.mesh:
        options.check_mesh(cluster.world_size)
        return [options.mesh]
    return [dict(zip(mesh.names, mesh.shape)) or None for mesh in enumerate_meshes(cluster, max_axes=2)]


def pareto_point(plan: Plan, cap: float | None) -> ParetoPoint:
    """A plan's time, energy and memory as one point. Raises BadInput if its energy was not computed."""
    cost, power_w = plan.predicted, plan.power_w
    if cost.energy_j is None or power_w is None:
        raise BadInput("the plan has no energy", "plan", "make it again with this hpml")
    return ParetoPoint(
        plan.world_size, dict(plan.mesh), cap, plan.step_graphs[0].solver.objective, cost.step_time_us * 1e-6,
        cost.energy_j, power_w, cost.energy_label or "estimated", plan.memory.peak,
    )
