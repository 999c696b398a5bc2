"""Time, energy and memory of the whole batch on the ranks of a stage, and the least work of a step over all of them."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpml_compiler.planner.joint.open_decisions import TENSOR_AXIS, rows_over, splits_of
from passes.checkpointing.recompute_frontier import SavedChoice


@dataclass(frozen=True)
class LeastOverlapped:
    """Bounds of a rank's work over all placements on a stage mesh whose ranks run the full graph on the whole batch, where
    communication that computation can hide only slows it down; 0: unknown. us: with all communication of parameters after the
    last microbatch, where there are stages. inside_us: without that, and without the optimizer. layer_us: of one repeated
    layer, likewise. recomputing_us: beside what is recomputed, where there are no stages."""

    us: float = 0.0
    inside_us: float = 0.0
    layer_us: float = 0.0
    recomputing_us: float = 0.0


@dataclass(frozen=True)
class StageCost:
    """A stage mesh as if its ranks ran the full graph on the whole batch and saved everything. us: of the answer, of which
    parameter_us is communication of parameters and gradients, repeated_us the same with gathers in forward and again in
    backward, and compute_us computation, of which layers_us is that of the repeated layers, with the part forward_share in
    forward, and end_us the least after the last layer, up to its backward; bound_us: no placements on this mesh take less.
    state_bytes: parameters, gradients and optimizer state, sharded over all ranks but replicas; saved_bytes: all
    activations that backward reads; largest_bytes: of the largest value; output_bytes: a rank's part of the outputs besides
    the loss, which a loop collects; parameter_bytes: of all parameters, unsharded; accumulate_us: to add one microbatch's
    gradients of these. placed: False for an estimate from another mesh. overlapped: of placements on this mesh. compute_w,
    moved_w: mean power, above that of idle devices, of computation and of communication with its links; least_uj: no
    placements on this mesh compute with less energy above idle, and placed_uj: compute and communicate; 0: unknown."""

    mesh: dict[str, int]
    us: float
    bound_us: float
    state_bytes: float
    saved_bytes: float
    largest_bytes: float
    output_bytes: float
    parameter_us: float = 0.0
    compute_us: float = 0.0
    parameter_bytes: float = 0.0
    layers_us: float = 0.0
    end_us: float = 0.0
    forward_share: float = 0.0
    repeated_us: float = 0.0
    accumulate_us: float = 0.0
    placed: bool = True
    overlapped: LeastOverlapped = LeastOverlapped()
    compute_w: float = 0.0
    moved_w: float = 0.0
    least_uj: float = 0.0
    placed_uj: float = 0.0

    @property
    def tensor(self) -> int:
        return self.mesh.get(TENSOR_AXIS, 1)

    def on(self, mesh: dict[str, int], farther: float = 1.0) -> StageCost:
        """The same on the fewer ranks of one of several stages, each of which has more rows. farther: multiple of the time of
        communication of parameters, whose ranks may be on fewer nodes."""
        more, parameter_us = rows_over(self.mesh) / rows_over(mesh), farther * self.parameter_us
        return replace(self, mesh=mesh, placed=False, overlapped=LeastOverlapped(), bound_us=0.0, placed_uj=0.0,
                       us=(self.us - self.parameter_us) * more + parameter_us, parameter_us=parameter_us,
                       repeated_us=farther * self.repeated_us,
                       state_bytes=self.state_bytes * splits_of(self.mesh) / splits_of(mesh),
                       saved_bytes=self.saved_bytes * more, largest_bytes=self.largest_bytes * more,
                       output_bytes=self.output_bytes * more, compute_us=self.compute_us * more,
                       layers_us=self.layers_us * more, end_us=self.end_us * more, least_uj=self.least_uj * more)


@dataclass(frozen=True)
class LeastWork:
    """The least computation of a step, on any mesh, if it were spread evenly over all ranks. us: of a rank, of which layers_us
    is in repeated layers, of which forward is the part forward_share, and end_us after the last one; layers: their number, 0
    where they differ. saved: what one of them, unsharded and with the whole batch, may save, and recomputes then; (): unknown.
    uj: its energy above that of an idle device."""

    us: float = 0.0
    layers_us: float = 0.0
    end_us: float = 0.0
    forward_share: float = 0.0
    layers: int = 0
    saved: tuple[SavedChoice, ...] = ()
    uj: float = 0.0

    def with_another(self, cost: StageCost, stages: int) -> LeastWork:
        """The least of these and one more mesh, of a stage of so many."""
        share = min(self.forward_share, cost.forward_share) if self.us else cost.forward_share
        return replace(self, us=min(self.us or math.inf, cost.compute_us / stages), forward_share=share,
                       layers_us=min(self.layers_us if self.us else math.inf, cost.layers_us / stages),
                       end_us=min(self.end_us if self.us else math.inf, cost.end_us / stages),
                       uj=min(self.uj if self.us else math.inf, cost.least_uj / stages))
