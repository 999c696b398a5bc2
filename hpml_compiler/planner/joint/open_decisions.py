"""Decisions that the options leave open: stages, mesh of a stage, microbatches and schedule."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpml_compiler.option_values import needs_stages
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, devices_of_stage
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.pipeline.schedule_orders import ScheduleName

REPLICA_AXIS, DATA_AXIS, TENSOR_AXIS = "replica", "dp", "tp"
"""Axes of a stage. Rows are split over the first two, parameters over the last two: the first is there where the sizes of the
parameters do not divide by the number of devices that split the rows."""
LARGE = 0.1
"""Part of the bytes of the largest parameter from which a parameter should be split."""


class OpenSchedule(NamedTuple):
    """bubble: rough part of 1F1B's bubble that remains; in_flight: rough multiple of its saved values."""

    name: ScheduleName
    virtual_stages: int = 1
    bubble: float = 1.0
    in_flight: float = 1.0


OPEN_SCHEDULES = (OpenSchedule("1f1b"), OpenSchedule("interleaved", 2, 0.5, 1.5), OpenSchedule("zero_bubble", 1, 0.4, 1.1),
                  OpenSchedule("zbv", 2, 0.2))
LEAST_VIRTUAL = {"interleaved": 2, "zbv": 2}
"""Fewest stages of a rank, by schedule: 1 for others."""
WITHOUT_STAGES, LOSS_OUTSIDE = OpenSchedule("1f1b"), OpenSchedule("gpipe")


@dataclass(frozen=True)
class OpenDecisions:
    """Decisions that a search may make. rows: of the batch. shapes: of the large parameters. at_once: backward of a microbatch
    may follow its forward, since the loss is inside. mixed: operations at which rows depend on each other, so that there are no
    microbatches. pipelined: consider configurations with stages only, or only without; None: both."""

    options: Options
    cluster: Cluster
    rows: int
    shapes: Sequence[tuple[int, ...]] = ()
    at_once: bool = True
    mixed: Sequence[str] = ()
    pipelined: bool | None = None

    @property
    def any(self) -> bool:
        """True if the search has a choice that planning with these options does not have."""
        options = self.options
        if options.plan is not None or options.mesh_order is not None:
            return False
        return self.microbatches_are_open and self.rows > 1 or self.saved_is_open or self.axes_are_open

    @property
    def axes_are_open(self) -> bool:
        return leaves_axes_open(self.options, self.cluster.world_size)

    @property
    def has_meshes(self) -> bool:
        """True if some mesh has all axes that are pinned."""
        return any(self.stage_meshes(stages) for stages in self.stage_counts())

    @property
    def saved_is_open(self) -> bool:
        return not self.options.chooses_saved

    @property
    def microbatches_are_open(self) -> bool:
        return "microbatches" not in self.options.model_fields_set

    def stage_counts(self, layers: int | None = None) -> Iterator[int]:
        """Numbers of pipeline stages that the cluster can be divided into, fewest first, and at most as many as layers."""
        return (each for each in self._stage_counts(layers) if self.pipelined is None or self.pipelined == (each > 1))

    def _stage_counts(self, layers: int | None) -> Iterator[int]:
        mesh = self.options.mesh
        if mesh is not None and (PP_AXIS in mesh or not self.axes_are_open) or self.mixed and self.microbatches_are_open:
            if not schedule_needs_stages(self.options):
                yield self.options.stage_ranks
            return
        fewest, most = 1 + schedule_needs_stages(self.options), min(self.cluster.world_size, layers or self.cluster.world_size)
        for stages in range(fewest, most + 1):
            try:
                devices_of_stage(self.cluster, stages)
            except BadInput:
                continue
            yield stages

    def stage_meshes(self, stages: int) -> list[dict[str, int]]:
        """Axes of a stage, those with the largest tensor axis within a node first; if there are any, those that split the large
        parameters evenly."""
        pinned = {name: size for name, size in (self.options.mesh or {}).items() if name != PP_AXIS}
        if self.options.mesh is not None and not self.axes_are_open:
            return [pinned]
        devices = devices_of_stage(self.cluster, stages)
        tensors = [size for size in range(devices.devices_per_node, 0, -1)
                   if devices.world_size % size == 0 and self.rows % (devices.world_size // size) == 0]
        even = tensors if TENSOR_AXIS in pinned else [size for size in tensors if self._divides(size)]
        found = [self.axes(devices.world_size // size, size) for size in even or tensors]
        return [mesh for mesh in found if all(mesh.get(name, 1) == size for name, size in pinned.items())]

    def axes(self, data: int, tensor: int) -> dict[str, int]:
        """Axes that split rows over `data` devices, of which as many as their sizes allow split parameters."""
        splits = next(size for size in range(data, 0, -1) if data % size == 0 and self._divides(size))
        named = {REPLICA_AXIS: data // splits, DATA_AXIS: splits} if splits > 1 else {DATA_AXIS: data}
        return {name: size for name, size in (*named.items(), (TENSOR_AXIS, tensor)) if size > 1}

    def _divides(self, devices: int) -> bool:
        """True if so many devices divide the large parameters."""
        return all(any(dim % devices == 0 for dim in shape) for shape in self.shapes)

    def microbatch_counts(self, mesh: dict[str, int]) -> list[int]:
        """Numbers of microbatches that the rows of a rank divide into."""
        if not self.microbatches_are_open:
            return [self.options.microbatches]
        if self.mixed:
            return [1]
        own = max(self.rows // rows_over(mesh), 1)
        return [count for count in range(1, own + 1) if own % count == 0]

    def schedules(self, stages: int, microbatches: int, layers: int = 0) -> list[OpenSchedule]:
        """Schedules that so many stages and microbatches may follow, where each stage has one of so many layers; 0: unknown."""
        options = self.options
        if stages == 1:
            return [WITHOUT_STAGES]
        if options.schedule != "auto" or options.virtual_stages > 1:
            known = {each.name: each for each in OPEN_SCHEDULES}
            if options.schedule_name == "interleaved" and microbatches % stages and self.microbatches_are_open:
                return []
            virtual = max(options.virtual_stages, LEAST_VIRTUAL.get(options.schedule_name, 1))
            return [known.get(options.schedule_name, OpenSchedule(options.schedule_name))._replace(virtual_stages=virtual)]
        if not self.at_once:
            return [LOSS_OUTSIDE]
        return [each for each in OPEN_SCHEDULES if (each.name != "interleaved" or microbatches % stages == 0)
                and (each.virtual_stages == 1 or stages * each.virtual_stages <= (layers or math.inf))]


def schedule_needs_stages(options: Options) -> bool:
    """True if a schedule of stages is pinned, but no number of stages."""
    return needs_stages(options.mesh, options.schedule, options.virtual_stages)


def leaves_axes_open(options: Options, world_size: int) -> bool:
    """True if the pinned axes of the mesh divide the devices, of which they leave several for others; or if a schedule is
    pinned, which leaves the number of stages open."""
    pinned = math.prod((options.mesh or {}).values())
    return (options.mesh is not None or schedule_needs_stages(options)) and pinned < world_size and world_size % pinned == 0


def described_pins(options: Options) -> str:
    """The pins that leave a part of the mesh open, for a message."""
    mesh = " x ".join(f"{name} {size}" for name, size in (options.mesh or {}).items())
    schedule = f"the schedule {options.schedule_name}" if schedule_needs_stages(options) else ""
    return " and ".join(part for part in (mesh and f"{mesh} of the mesh", schedule) if part)


def rows_over(mesh: dict[str, int]) -> int:
    """Number of ranks of a stage that rows are split over."""
    return mesh.get(REPLICA_AXIS, 1) * mesh.get(DATA_AXIS, 1)


def splits_of(mesh: dict[str, int]) -> int:
    """Number of ranks of a stage that parameters may be split over."""
    return math.prod(mesh.values()) // mesh.get(REPLICA_AXIS, 1)
