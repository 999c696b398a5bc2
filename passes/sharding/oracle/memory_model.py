"""The moments of a step at which bytes are counted, and what of a decision is held at each."""
from __future__ import annotations

from dataclasses import dataclass

from passes.sharding.oracle.cost_check import DecisionCost

HeldBytes = tuple[float, ...]


@dataclass(frozen=True)
class MemoryModel:
    """saved_share: None, if the whole step is one moment, at which all saved values and all gradients are there. Else there
    are two: the end of forward, when saved values are there and gradients are not, and the end of backward, when it is the
    other way round. In between, one goes as the other comes. Of the saved values this share counts: the rest can be computed
    once more (`passes.checkpointing` decides which, of the graph that a rank really runs). made: at the second moment, tensors
    of a gradient's size that the optimizer makes during its step. in_flight: where the step is one moment, the share of a batch
    whose saved values are there at a time, since it goes through in microbatches."""

    saved_share: float | None = None
    made: float = 0.0
    in_flight: float = 1.0

    @property
    def positions(self) -> tuple[str, ...]:
        return ("step",) if self.saved_share is None else ("end of forward", "end of backward")

    def parameter(self, state: float, gradient: float) -> HeldBytes:
        """Of a parameter. state: bytes of itself and of what the optimizer keeps for it."""
        return (state + gradient,) if self.saved_share is None else (state, state + (1 + self.made) * gradient)

    def saved(self, nbytes: float) -> HeldBytes:
        return (self.in_flight * nbytes,) if self.saved_share is None else (self.saved_share * nbytes, 0.0)

    def nothing(self) -> HeldBytes:
        return (0.0,) * len(self.positions)

    def of(self, cost: DecisionCost) -> HeldBytes:
        """Of a whole decision."""
        state = self.parameter(cost.parameter_bytes + cost.optimizer_bytes, cost.gradient_bytes)
        return tuple(a + b for a, b in zip(state, self.saved(cost.activation_bytes), strict=True))


STEP_PEAK = MemoryModel()
"""One moment: what was held at any time counts all the time."""
