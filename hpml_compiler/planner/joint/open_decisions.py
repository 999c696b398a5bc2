"""Decisions that the options leave open, and the candidates for them: stages, mesh of a stage, and microbatches."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, devices_of_stage
from passes.errors import BadInput
from passes.hardware.cluster import Cluster

DATA_AXIS, TENSOR_AXIS = "dp", "tp"
KEPT_OF_ALL = 0.1
"""Rough part of the saved bytes that remains where layers save little more than their inputs."""
LARGEST = 3.0
"""Values as large as the largest that are in memory at its peak, such as logits, their softmax and their gradient."""
ROOM = 0.9
"""Part of a device's memory that an estimate may fill."""


@dataclass(frozen=True)
class OpenDecisions:
    """Decisions that a search may make. rows: of the batch."""

    options: Options
    cluster: Cluster
    rows: int

    @property
    def any(self) -> bool:
        """True if the search has a choice that planning with these options does not have."""
        options = self.options
        if options.plan is not None or options.objective != "time" or options.mesh_order is not None:
            return False
        return self.microbatches_are_open and self.rows > 1 or self.saved_is_open

    @property
    def saved_is_open(self) -> bool:
        return not self.options.chooses_saved

    @property
    def microbatches_are_open(self) -> bool:
        return "microbatches" not in self.options.model_fields_set

    def stage_counts(self) -> Iterator[int]:
        """Numbers of pipeline stages that the cluster can be divided into, fewest first."""
        if self.options.mesh is not None:
            yield self.options.stage_ranks
            return
        for stages in range(1, self.cluster.world_size + 1):
            try:
                devices_of_stage(self.cluster, stages)
            except BadInput:
                continue
            yield stages

    def stage_meshes(self, stages: int) -> list[dict[str, int]]:
        """Axes of a stage, those with the largest tensor axis within a node first."""
        if self.options.mesh is not None:
            return [{name: size for name, size in self.options.mesh.items() if name != PP_AXIS}]
        devices = devices_of_stage(self.cluster, stages)
        found = [{DATA_AXIS: devices.world_size // tensor, TENSOR_AXIS: tensor}
                 for tensor in range(devices.devices_per_node, 0, -1)
                 if devices.world_size % tensor == 0 and self.rows % (devices.world_size // tensor) == 0]
        return [{name: size for name, size in mesh.items() if size > 1} for mesh in found]

    def microbatch_counts(self, mesh: dict[str, int]) -> list[int]:
        """Numbers of microbatches that the rows of a rank divide into."""
        if not self.microbatches_are_open:
            return [self.options.microbatches]
        own = max(self.rows // mesh.get(DATA_AXIS, 1), 1)
        return [count for count in range(1, own + 1) if own % count == 0]


@dataclass(frozen=True)
class StageCost:
    """A stage mesh as if its ranks ran the full graph on the whole batch and saved everything. us: of the answer;
    bound_us: no placements on this mesh take less. state_bytes: parameters, gradients and optimizer state, sharded over all
    ranks; saved_bytes: all activations that backward reads; largest_bytes: of the largest value; whole_bytes: outputs besides
    the loss, which are returned unsharded from a loop."""

    mesh: dict[str, int]
    us: float
    bound_us: float
    state_bytes: float
    saved_bytes: float
    largest_bytes: float
    whole_bytes: float


@dataclass(frozen=True)
class JointCandidate:
    """One configuration. stages: 1 without a pipeline. limit: bytes of a device."""

    stages: int
    cost: StageCost
    microbatches: int
    limit: float

    @property
    def mesh(self) -> dict[str, int]:
        return {**({PP_AXIS: self.stages} if self.stages > 1 else {}), **self.cost.mesh}

    @property
    def bound_us(self) -> float:
        """No step of this configuration takes less: its work is spread evenly over the stages, and recomputes nothing."""
        return self.cost.bound_us / self.stages

    def bytes_with(self, kept: float) -> float:
        """Estimated bytes of a rank that saves this part of the activations."""
        cost, in_loop = self.cost, self.stages > 1 or self.microbatches > 1
        flight = min(self.stages, self.microbatches) / self.microbatches
        return (cost.state_bytes / self.stages + flight * kept * cost.saved_bytes / self.stages
                + LARGEST * cost.largest_bytes / self.microbatches + (cost.whole_bytes if in_loop else 0.0))

    @property
    def may_fit(self) -> bool:
        return self.bytes_with(KEPT_OF_ALL) <= ROOM * self.limit

    @cached_property
    def us(self) -> float:
        """Estimated time, in which everything that does not fit is recomputed."""
        most, least = self.bytes_with(1.0), self.bytes_with(KEPT_OF_ALL)
        again = min(max((most - ROOM * self.limit) / (most - least), 0.0), 1.0) if most > least else 0.0
        bubble = (self.stages - 1) / self.microbatches
        return self.cost.us / self.stages * (1.0 + bubble) * (1.0 + again / 3) * (1.0 + 1e-3 * self.microbatches)

    def options(self, options: Options) -> Options:
        """The options that pin this configuration."""
        update: dict[str, Any] = {"mesh": self.mesh or None, "microbatches": self.microbatches}
        if not options.chooses_saved:
            update["memory_budget"] = int(self.limit)
        return options.model_copy(update=update)

    def __str__(self) -> str:
        parts = [f"{self.stages} stages"] * (self.stages > 1) + [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        return " in ".join(parts) or "the whole batch at once"
