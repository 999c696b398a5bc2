"""Memory model of a placement problem: the points of a step at which bytes are counted, and the bytes at each."""
from __future__ import annotations

from dataclasses import dataclass

from passes.sharding.oracle.cost_check import DecisionCost

HeldBytes = tuple[float, ...]


@dataclass(frozen=True)
class MemoryModel:
    """saved_share: None if the whole step is one point, with all saved values and all gradients in memory. Otherwise there are
    two: the end of forward, with saved values and no gradients, and the end of backward, the other way round; in between one is
    freed as the other is allocated. Only this share of the saved values counts: the rest can be recomputed
    (`passes.checkpointing` decides which, on the graph that a rank really runs). transient: at the second point, tensors of a
    gradient's size that the optimizer allocates during its step. in_flight: with one point, the fraction of a batch whose saved
    values are in memory at a time, because of microbatches."""

    saved_share: float | None = None
    transient: float = 0.0
    in_flight: float = 1.0

    @property
    def positions(self) -> tuple[str, ...]:
        return ("step",) if self.saved_share is None else ("end of forward", "end of backward")

    def parameter(self, state: float, gradient: float) -> HeldBytes:
        """Bytes of a parameter. state: bytes of itself and of its optimizer state."""
        return (state + gradient,) if self.saved_share is None else (state, state + (1 + self.transient) * gradient)

    def saved(self, nbytes: float) -> HeldBytes:
        return (self.in_flight * nbytes,) if self.saved_share is None else (self.saved_share * nbytes, 0.0)

    def nothing(self) -> HeldBytes:
        return (0.0,) * len(self.positions)

    def of(self, cost: DecisionCost) -> HeldBytes:
        """Bytes of a whole decision."""
        state = self.parameter(cost.parameter_bytes + cost.optimizer_bytes, cost.gradient_bytes)
        return tuple(a + b for a, b in zip(state, self.saved(cost.activation_bytes), strict=True))


STEP_PEAK = MemoryModel()
"""One point: everything that is in memory at any time counts all the time."""
