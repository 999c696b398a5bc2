"""One configuration of a step, with its estimated time and memory, and a lower bound of its time."""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpml_compiler.options import Options
from hpml_compiler.planner.joint.open_decisions import WITHOUT_STAGES, OpenSchedule, splits_of
from hpml_compiler.planner.joint.stage_cost import LeastWork, StageCost
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS
from passes.checkpointing.recompute_frontier import least_recompute_us
from passes.pipeline.least_step import (
    least_even_us,
    least_interleaved_us,
    least_of_layers_us,
    least_step_us,
    least_with_end_us,
)
from passes.simulation.event_simulator import least_overlapped_us

KEPT_OF_ALL = 0.1
"""Rough part of the saved bytes that remains where layers save little more than their inputs."""
LARGEST = 3.0
"""Values as large as the largest that are in memory at its peak, such as logits, their softmax and their gradient."""
MANY_PARTS = 5000
"""Runs of all stages for all microbatches, from which schedules other than 1F1B take long to plan."""
ROOM = 0.9
"""Part of a device's memory that an estimate may fill."""
IN_LOOP = 3.0
"""Copies of unsharded parameters in a loop besides the sharded state: themselves, their accumulated gradients, and those of one
microbatch."""
FORWARD = 1 / 3
"""Part of a step that recomputing everything takes again."""
STEEP = 5
"""Power of the part that is not saved by which recomputed time grows: what is cheap to recompute is recomputed first."""


@dataclass(frozen=True)
class JointCandidate:
    """One configuration. stages: 1 without a pipeline. limit: bytes of a device. least: of all configurations.
    contention: slowdown of computation and communication at the same time."""

    stages: int
    cost: StageCost
    microbatches: int
    limit: float
    schedule: OpenSchedule = WITHOUT_STAGES
    least: LeastWork = LeastWork()
    contention: float = 1.0

    @property
    def mesh(self) -> dict[str, int]:
        return {**({PP_AXIS: self.stages} if self.stages > 1 else {}), **self.cost.mesh}

    @property
    def in_loop(self) -> bool:
        return self.stages > 1 or self.microbatches > 1

    @property
    def splits_backward(self) -> bool:
        return self.schedule.virtual_stages == 1 and self.schedule.bubble < 1.0

    @cached_property
    def bound_us(self) -> float:
        """No simulated step of this configuration takes less, whatever is recomputed or sent: the placements of the whole batch
        on a stage's ranks, with everything saved, are the least work of all stages together, of which communication may
        overlap computation, which slows down both. What is done once for parameters comes after the last microbatch of a stage,
        while its gradients go back through others: ranks wait for these, or have that to do."""
        found, p, beside = self.cost.overlapped, self.stages, self.contention - 1.0
        again_us = self.least_again_us
        if p == 1:
            return max(found.us, least_overlapped_us(self.cost.bound_us, self.least.us, self.contention),
                       max(found.recomputing_us, self.least.us) + again_us)
        # In each microbatch, the same communication takes so much of the time of computation that it may overlap.
        once = min(1.0, self.microbatches * beside) * max(found.us - found.inside_us, 0.0)
        least_us = p * self.least.us
        return max(self._least_us(max(found.inside_us, least_us + again_us), self.splits_backward),
                   self._least_us(max(found.inside_us + once, least_us), True))

    @cached_property
    def least_again_us(self) -> float:
        """No rank's layers, spread evenly, recompute less in all stages together, if values of all microbatches in flight are
        saved within the memory that state leaves; infinite where it leaves none. Values, and work, are divided by all ranks of
        a stage at best."""
        least, ranks = self.least, math.prod(self.cost.mesh.values())
        if self.least_bytes > self.limit:
            return math.inf
        if not least.saved or not least.layers:
            return 0.0
        held_bytes = 0.0  # stages have different parts of the state
        if self.stages == 1:
            held_bytes = self.least_bytes - (self.microbatches == 1) * self.cost.parameter_bytes / ranks  # no gradients yet
        saved_bytes = sum((self.limit - held_bytes) / self._in_flight(rank) for rank in range(self.stages))
        each_us = least_recompute_us(least.saved, ranks * self.microbatches * saved_bytes / least.layers)
        return least.layers * each_us / ranks

    @property
    def least_bytes(self) -> float:
        """Some rank has as much of parameters, gradients and optimizer state, if these are spread over all ranks."""
        return self.cost.state_bytes * splits_of(self.cost.mesh) / math.prod(self.cost.mesh.values()) / self.stages

    def _in_flight(self, rank: int) -> int:
        """At least so many microbatches are between their forward and their backward on a rank at some time."""
        if self.schedule.name == "gpipe" and self.stages > 1:
            return self.microbatches
        return 1 if self.schedule.name == "zbv" else min(self.stages - rank, self.microbatches)

    def _least_us(self, work_us: float, splits: bool) -> float:
        """The least time of a rank if all stages take work_us. splits: ranks wait for forward of others only."""
        return max(self._of_all_cuts_us(work_us, splits), self._of_even_cuts_us(work_us, splits))

    def _of_even_cuts_us(self, work_us: float, splits: bool) -> float:
        """The least time over even cuts, as those of the planner: each stage takes at least as long as the rounded-down share
        of the layers. The first and the last may have less communication, if they have fewer layers; where only forward is
        waited for, the first does not count: backward may be all that it has besides layers."""
        least, p, schedule = self.least, self.stages, self.schedule
        if p == 1 or not least.layers or schedule.name == "zbv":
            return 0.0
        layer_us, stages = p * least.layers_us / least.layers, p * schedule.virtual_stages
        fewest, inner_us = least.layers // stages, max(layer_us, self.cost.overlapped.layer_us)
        stages_us = [fewest * us for us in (layer_us, *[inner_us] * (stages - 2), layer_us)]
        waits_us = [0.0, *[least.forward_share * fewest * layer_us] * (stages - 1)] if splits else stages_us
        wait_us = least.forward_share * layer_us if splits else layer_us
        return max(least_even_us(work_us, stages_us, waits_us, p, self.microbatches), least_with_end_us(
            least.layers, layer_us, inner_us, p * least.end_us, p, (p - 1) * fewest * wait_us / self.microbatches,
            wait_us / self.microbatches if schedule.virtual_stages == 1 else 0.0))

    def _of_all_cuts_us(self, work_us: float, splits: bool) -> float:
        """The least time over all cuts. Stages compute the layers and what is around them in order."""
        least, p, virtual = self.least, self.stages, self.schedule.virtual_stages
        layers_us = least_of_layers_us(p * least.layers_us, least.layers, p)
        if self.schedule.name == "zbv" or virtual > 1 and splits:  # the first stage of a rank may be small
            return max(work_us / p, layers_us)
        if virtual > 1:
            return max(layers_us, least_interleaved_us(work_us, p * least.us, p, self.microbatches, virtual))
        through_us, waited = (p * least.layers_us if least.layers else 0.0, least.forward_share) if splits else (
            p * least.us, 1.0)
        return max(least_step_us(work_us, through_us, p, self.microbatches, waited), layers_us)

    def bytes_with(self, kept: float, gathered: bool = False) -> float:
        """Estimated bytes of a rank that saves this part of the activations. gathered: parameters are gathered once."""
        cost = self.cost
        flight = min(self.schedule.in_flight * min(self.stages, self.microbatches) / self.microbatches, 1.0)
        unsharded = IN_LOOP * cost.parameter_bytes / cost.tensor if gathered and self.in_loop else 0.0
        return ((cost.state_bytes + unsharded) / self.stages + flight * kept * cost.saved_bytes / self.stages
                + LARGEST * cost.largest_bytes / self.microbatches + (cost.output_bytes if self.in_loop else 0.0))

    @cached_property
    def may_fit(self) -> bool:
        return self.bytes_with(KEPT_OF_ALL) <= ROOM * self.limit

    @property
    def recomputes(self) -> bool:
        """True if not all that backward reads fits."""
        return self.bytes_with(1.0, self._gathered) > ROOM * self.limit

    @property
    def takes_long(self) -> bool:
        """True if planning this takes several times as long as 1F1B: other schedules that recompute, or have many parts."""
        parts = self.stages * self.schedule.virtual_stages * self.microbatches
        return self.stages > 1 and self.schedule.bubble < 1.0 and (self.recomputes or parts > MANY_PARTS)

    @cached_property
    def us(self) -> float:
        """Estimated time, in which everything that does not fit is recomputed, and where unsharded parameters do not fit, they
        are gathered in each microbatch. Communication of parameters overlaps with all other work, which it slows down."""
        return self._us(self._gathered)

    @cached_property
    def saved_us(self) -> float:
        """The same without what is recomputed."""
        return self._us(self._gathered, saved=True)

    @cached_property
    def above_idle_uj(self) -> float:
        """Estimated energy of a rank above that of an idle one, in µJ."""
        cost = self.cost
        again_us = max(self.us - self.saved_us, 0.0)
        moved_us = cost.us - cost.compute_us - cost.parameter_us + self._parameter_us(self._gathered)
        return (cost.compute_us * cost.compute_w + moved_us * cost.moved_w) / self.stages + again_us * cost.compute_w

    @property
    def least_above_idle_uj(self) -> float:
        """No placements of this configuration take less energy of a rank above that of an idle one, in µJ."""
        own_uj = max(self.cost.least_uj, self.cost.placed_uj) if self.cost.placed else 0.0  # else an estimate
        return max(self.least.uj, own_uj / self.stages)

    @cached_property
    def _gathered(self) -> bool:
        return self.bytes_with(KEPT_OF_ALL, True) <= ROOM * self.limit and self._us(True) <= self._us(False)

    def _us(self, gathered: bool, saved: bool = False) -> float:
        most, least = self.bytes_with(1.0, gathered), self.bytes_with(KEPT_OF_ALL, gathered)
        again = min(max((most - ROOM * self.limit) / (most - least), 0.0), 1.0) if most > least and not saved else 0.0
        bubble = self.schedule.bubble * (self.stages - 1) / self.microbatches
        work_us = (self.cost.us - self.cost.parameter_us) * (self._uneven + bubble) * (1.0 + FORWARD * again ** STEEP)
        accumulate_us = self.cost.accumulate_us / (1 if gathered else splits_of(self.cost.mesh) / self.cost.tensor)
        work_us += (self.microbatches - 1) * accumulate_us
        moved_us = self._parameter_us(gathered)
        return (max(work_us, moved_us) + (self.contention - 1.0) * min(work_us, moved_us)) / self.stages

    def _parameter_us(self, gathered: bool) -> float:
        return self.cost.parameter_us if gathered or not self.in_loop else self.microbatches * self.cost.repeated_us

    @property
    def _uneven(self) -> float:
        """Work of the slowest rank over the mean. The last one has what is around the layers, and fewer of these for it."""
        cost, layers, p = self.cost, self.least.layers, self.stages
        if p == 1 or not layers or not cost.layers_us:
            return 1.0
        ends = max(cost.compute_us - cost.layers_us, 0.0) * layers / cost.layers_us
        most = math.ceil(layers / p)
        slowest = min(max(most + more, layers - (most + more) * (p - 1) + ends) for more in range(math.ceil(ends) + 1))
        return slowest * p / (layers + ends)

    def options(self, options: Options) -> Options:
        """The options that pin this configuration."""
        update: dict[str, Any] = {"mesh": self.mesh or None, "microbatches": self.microbatches}
        if self.stages > 1:
            update |= {"schedule": self.schedule.name, "virtual_stages": self.schedule.virtual_stages}
        if not options.chooses_saved:
            update["memory_budget"] = int(self.limit)
        return options.model_copy(update=update)

    def __str__(self) -> str:
        parts = [f"{self.stages} stages"] * (self.stages > 1) + [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        how = f" ({self.schedule.name})" if self.stages > 1 else ""
        return " in ".join(parts) + how if parts else "the whole batch at once"
