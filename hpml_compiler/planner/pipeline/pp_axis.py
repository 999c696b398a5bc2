"""The `pp` axis of a mesh, along which pipeline stages lie, and the other axes, over which each stage is sharded.

All stages have meshes of one shape. A value that is replicated along `pp` has a layout over the other axes, and one over all.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_compiler.options import Options
from hpml_compiler.plans.record_fields import Placements
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.units import divisors
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.op_rules.base import REPLICATE, format_placement
from passes.pipeline.pipeline_schedule import PipelineSchedule, make_schedule

if TYPE_CHECKING:
    from passes.sharding.oracle.memory_model import MemoryModel

PP_AXIS = "pp"
WHOLE = format_placement(REPLICATE)


def same_mesh(one: Mapping[str, int], other: Mapping[str, int] | None) -> bool:
    """True if two meshes have the same axes in the same order."""
    return other is not None and [*one.items()] == [*other.items()]


def has_stages(mesh: Mapping[str, int] | None) -> bool:
    return (mesh or {}).get(PP_AXIS, 1) > 1


def axes_of_stage(mesh: Mapping[str, int]) -> dict[str, int]:
    """Axes of a mesh over which a stage is sharded."""
    return {name: size for name, size in mesh.items() if name != PP_AXIS}


def is_split(mesh: Mapping[str, int]) -> bool:
    """True if a stage has more than one rank."""
    return any(size > 1 for size in axes_of_stage(mesh).values())


def devices_of_stage(cluster: Cluster, stages: int) -> Cluster:
    """Devices of one stage: full nodes if the stages divide their number, else a part of one node."""
    group = cluster.group
    if group.nodes % stages == 0:
        return Cluster((replace(group, nodes=group.nodes // stages),))
    if group.devices_per_node % stages == 0:
        return Cluster((replace(group, devices_per_node=group.devices_per_node // stages),))
    raise BadInput(f"{stages} stages do not divide {group.nodes} nodes of {group.devices_per_node} devices",
                   "options['mesh']['pp']", "choose a number of stages that divides the nodes, or the devices per node: "
                   + ", ".join(map(str, sorted({*divisors(group.nodes), *divisors(group.devices_per_node)})[:20])))


def cluster_of_stage(cluster: Cluster, stages: int) -> Cluster:
    """Devices of one stage, each with the memory of its peers in all stages: one stage is planned to run the full graph."""
    group = devices_of_stage(cluster, stages).group
    return Cluster((replace(group, device=replace(group.device, memory_bytes=stages * group.device.memory_bytes)),))


def options_of_stage(options: Options) -> Options:
    """Options for planning the ranks of one stage, as if they ran the full graph."""
    mesh, budget = options.mesh or {}, options.memory_budget
    update: dict[str, Any] = {"mesh": axes_of_stage(mesh)} if is_split(mesh) else {"mesh": None, "plan": None}
    if isinstance(budget, int):  # as the memory of these devices, of which a fraction is taken
        update["memory_budget"] = options.stage_ranks * budget
    return options.model_copy(update=update)


def schedule_of(options: Options, microbatches: int) -> PipelineSchedule:
    """The schedule of the options. microbatches: as many as rows divide into."""
    return make_schedule(options.schedule_name, options.stage_ranks, microbatches, options.virtual_stages)


def memory_model_of(table: PipelineSchedule) -> MemoryModel:
    """When bytes are counted on such devices: those of the rank with most microbatches in flight."""
    from passes.sharding.oracle.memory_model import MemoryModel  # here: most callers only ask for axes

    in_flight = [sum(n for n, rank in zip(table.in_flight(), table.ranks) if rank == own) for own in range(len(table.actions))]
    return MemoryModel(in_flight=max(in_flight) / table.microbatches * len(table.actions) / table.stages)


def over_all_axes(record: GraphPlan, mesh: Mapping[str, int]) -> GraphPlan:
    """Extend a plan of the ranks of one stage to placements over all axes of a mesh, replicated along `pp`."""

    def all_of(placements: Placements) -> Placements:
        rest = iter(placements)
        return tuple(WHOLE if name == PP_AXIS else next(rest) for name in mesh) if placements else ()

    parameters = {name: each.model_copy(update={
        "placements": all_of(each.placements), "held": all_of(each.held)})
        for name, each in record.parameters.items()}
    operations = {name: each.model_copy(update={
        "inputs": tuple(map(all_of, each.inputs)), "outputs": tuple(map(all_of, each.outputs))})
        for name, each in record.operations.items()}
    moves = tuple(each.model_copy(update={"source": all_of(each.source), "target": all_of(each.target)})
                  for each in record.redistributions)
    return record.model_copy(update={
        "mesh": dict(mesh), "outputs": {name: all_of(each) for name, each in record.outputs.items()},
        "parameters": parameters, "operations": operations, "redistributions": moves})
