"""Session of one process: the device mesh in use and the plans of the graphs compiled so far."""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.monitor.monitor import PlanMonitor
from hpml_compiler.monitor.stage_monitor import StagesReport
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.plan_assembly import as_plan, with_peak
from hpml_compiler.planner.joint.chosen_configuration import ChosenConfiguration
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.runtime.install.uncompiled_models import why_nothing_is_compiled
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.process.compute_device import device_type, forget_device
from hpml_compiler.runtime.process.world_group import group_timeout
from hpml_compiler.session.running_graphs import as_they_run
from hpml_compiler.session.step_memory import StepGraphs
from passes import compat
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import BadInput
from passes.graph.decision import LossChunking
from passes.graph.layouts import StoredLayout
from passes.hardware.axis import device_axes
from passes.hardware.cluster import Cluster
from passes.op_rules.base import REPLICATE
from passes.pipeline.stage_assignment import StageAssignment
from passes.session_state import state, state_of
from passes.transforms.shard.redistributor import MeshGroups

log = logging.getLogger("hpml")


@dataclass
class Session:
    """State of one process. `mesh` is set by the first graph whose parameters are placed: all graphs of a model share it."""

    mesh: dict[str, int] | None = None
    graphs: list[GraphPlan] = field(default_factory=list)
    decided: dict[str, GraphPlan] = field(default_factory=dict)
    """On rank 0, which runs the planner: the first plan by graph structure (`hpml_compiler.planner.graph.same_structure`)."""
    trail: list[str] = field(default_factory=list)
    """Graph cache keys of the graphs so far, since a plan may depend on the graphs before it."""
    rejected: list[MeshAttempt] = field(default_factory=list)
    options: Options = field(default_factory=lambda: Options.parse(None))
    cluster: Cluster | None = None
    redundancy: int = 0
    """Ranks that are to hold a copy of each rank's state, as the options of any graph ask for."""
    looked: bool = False
    quick: CachedMeasurements | None = None
    """Quick profile of these devices (`hpml_compiler.profile.quick_profile`), if there is no full profile."""
    device_meshes: dict[tuple, DeviceMesh] = field(default_factory=dict)
    own_meshes: set[tuple] = field(default_factory=set)
    """Keys of the meshes whose process groups this session has created."""
    stage_starts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By frame, the first block of each stage but the first, so that evaluation is split into the same stages as training."""
    stages: dict[str, StageAssignment] = field(default_factory=dict)
    """By graph, its pipeline stages."""
    loss_chunks: dict[str, LossChunking] = field(default_factory=dict)
    """By graph, how this rank computes its loss."""
    monitor: PlanMonitor | None = None
    stages_report: StagesReport | None = None
    chosen: dict[tuple[tuple[str, int], ...], ChosenConfiguration] = field(default_factory=dict)
    """By the axes of its mesh, what a search decided: for all graphs of the parameters that are placed on them."""
    step: StepGraphs = field(default_factory=StepGraphs)
    """Memory of the graphs of a step, under a memory budget."""
    unplanned: dict[str, Callable[[str], GraphPlan]] = field(default_factory=dict)
    """Factories of plans that are built on demand, by the graph's name, which each takes."""

    def next_name(self) -> str:
        """Name of the graph that is compiled next."""
        return f"graph_{len(self.graphs) + len(self.unplanned)}"

    def enter(self, record: GraphPlan | Callable[[str], GraphPlan], options: Options, cluster: Cluster,
              rejected: Iterable[MeshAttempt] = ()) -> None:
        """Record the plan of a graph, or a factory that builds it on demand."""
        if isinstance(record, GraphPlan):
            self.graphs.append(record)
        else:
            self.unplanned[self.next_name()] = record
        self.options, self.cluster = options, cluster
        self.redundancy = max(self.redundancy, options.redundancy)
        self.rejected.extend(rejected)

    def device_mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """The DeviceMesh of these axes, created on first use; collective over all ranks."""
        key = _key(axes)
        if key not in self.device_meshes:
            with compat.outside_tracing():
                self.device_meshes[key] = _new_mesh(axes)
            self.own_meshes.add(key)
        return self.device_meshes[key]

    def adopt(self, mesh: DeviceMesh, name: str) -> dict[str, int]:
        """Axes of the mesh that parameter `name` is placed on; from now on, graphs on these axes use this mesh.

        Raises BadInput if its process group is gone, as after `destroy_process_group`.
        """
        names = mesh.mesh_dim_names or tuple(f"axis_{i}" for i in range(mesh.ndim))
        try:
            for axis in range(mesh.ndim):
                mesh.get_group(axis)
        except (RuntimeError, ValueError, LookupError) as error:
            raise BadInput("the process group that the model is sharded over was destroyed", f"parameter {name}",
                           "create a new model after init_process_group, and load the state into it") from error
        axes = dict(zip(names, mesh.shape, strict=True))
        self.device_meshes.setdefault(_key(axes), mesh)
        return axes

    def groups(self, axes: Mapping[str, int]) -> MeshGroups:
        """This rank's coordinate and process groups in the mesh of these axes; a single rank has a mesh without axes."""
        if not axes:
            return MeshGroups((), (), ())
        mesh = self.device_mesh(axes)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "every rank is in the mesh"
        return MeshGroups(device_axes(axes), tuple(coordinate), names_of_groups(mesh, axes))

    def close(self) -> None:
        """End the session: its monitor reports, its threads end, and its hooks and process groups are removed. All ranks call
        this. Closing twice does nothing; what is compiled next begins a new session.

        Compiled models are compiled anew in their next call. A model that was split over ranks cannot be called again.
        """
        if not state.has(Session) or current() is not self:
            return
        if self.monitor is not None:
            self.monitor.finish()
        torch.compiler.reset()
        world = dist.group.WORLD if dist.is_initialized() else None
        for key in self.own_meshes:
            for group in self.device_meshes[key].get_all_groups() if key[-1] is world else ():
                if group is not world:
                    dist.destroy_process_group(group)
        state.close()


def names_of_groups(mesh: DeviceMesh, axes: Iterable[str]) -> tuple[str, ...]:
    """Names of this rank's process groups along these axes in its graph; they are the same on all ranks."""
    shape = "x".join(map(str, mesh.shape))
    return tuple(compat.registered_as(f"hpml {shape} {axis}", mesh.get_group(axis)) for axis in axes)


def _key(axes: Mapping[str, int]) -> tuple:
    """Key of a mesh. It includes the world group, since a new one (`init_process_group` once more) needs its own meshes."""
    return tuple(axes.items()), device_type(), dist.group.WORLD


def _new_mesh(axes: Mapping[str, int]) -> DeviceMesh:
    """Create a mesh with its own process groups and the timeout of the world group. For one axis, torch would use the world
    group itself, on which other threads of a script may communicate on CPUs, as `torch.distributed.checkpoint.async_save` does.
    """
    if device_type() == "cpu" and len(axes) == 1:
        group: Any = dist.new_group(timeout=group_timeout())
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=tuple(axes))
    if len(axes) == 1:
        return init_device_mesh(device_type(), tuple(axes.values()), mesh_dim_names=tuple(axes))
    return compat.subgroups_mesh(device_type(), axes, group_timeout())


def current() -> Session:
    """The session that is open; opens one if none is."""
    return state_of(Session)


def reset(same_prices: bool = False) -> None:
    """Reset the session: the next compilation starts without mesh and plans, as for a new process group or another model.
    same_prices: it keeps the quick profile, so that its plan can be compared with those before."""
    before = current()
    # Meshes are reused, since each has process groups with threads and connections: a sweep over many models would
    # accumulate them.
    world = dist.group.WORLD if dist.is_initialized() else None
    kept = {key: mesh for key, mesh in before.device_meshes.items() if key[-1] is world}
    profile = {"looked": before.looked, "quick": before.quick} if same_prices else {}
    state.put(Session(device_meshes=kept, own_meshes={key for key in before.own_meshes if key in kept}, **profile))
    state.reset()
    forget_device()


def reset_process() -> None:
    """Reset all compiler state, as if the process had just started (`hpml_compiler.reset`); all ranks call it.

    Use it between models in one process. It clears Dynamo's graphs (as `torch.compiler.reset` does), the mesh, the plans and
    the monitor, which first reports if it has not yet. Measurements of the devices stay. An earlier model can still be used: it
    is recompiled, on the mesh that its parameters are placed on.
    """
    before = current()
    if before.monitor is not None:
        before.monitor.finish()
    torch.compiler.reset()
    compat.forget_interned_specs()
    reset(same_prices=True)


def to_dtensor(stored: StoredLayout) -> tuple[Placement, ...]:
    """DTensor placements of a stored parameter."""
    return tuple(Replicate() if p == REPLICATE else Shard(p[0]) if p[1] == 1 else InnerShard(*p)  # type: ignore[arg-type]
                 for p in stored)


def from_dtensor(placements: tuple[Placement, ...]) -> StoredLayout:
    """Inverse of `to_dtensor`; a parameter that a single rank of an axis owns counts as replicated on that axis."""
    return tuple((p.dim, p.outer) if isinstance(p, InnerShard) else (p.dim, 1) if isinstance(p, Shard) else REPLICATE
                 for p in placements)


def last_plan() -> Plan:
    """The plan of all graphs that this process has compiled so far; raises BadInput if there is none."""
    made = current()
    while made.unplanned:
        name, factory = next(iter(made.unplanned.items()))
        made.graphs.append(factory(name))
        del made.unplanned[name]
    if not made.graphs and (why := why_nothing_is_compiled()):
        raise BadInput(why, "last_plan", "change that part of the model, or compile only the other parts")
    if not made.graphs:
        raise BadInput("no graph was planned yet (plans are made for several ranks, a memory budget or microbatches)",
                       "last_plan",
                       "call the compiled model first")
    made.graphs = [with_peak(graph, made.options, made.cluster) for graph in made.graphs]
    compiled = sorted(made.graphs, key=lambda graph: int(graph.name.rpartition("_")[2]))
    trainings_first = sorted(as_they_run(compiled), key=lambda graph: not graph.training)
    return as_plan(trainings_first, made.rejected, made.options, made.cluster)


def save_plan() -> None:
    """Save the plan on rank 0 to the path in the environment variable HPML_SAVE_PLAN, if it is set."""
    path = os.environ.get("HPML_SAVE_PLAN")
    if path and not (dist.is_initialized() and dist.get_rank()):
        try:
            last_plan().save(path)
        except BadInput as error:  # training continues without the file; the other ranks do not depend on it
            log.error("HPML_SAVE_PLAN: %s", error)
