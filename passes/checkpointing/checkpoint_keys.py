"""What passes say about keeping."""
from __future__ import annotations

from dataclasses import dataclass

from passes.annotations import Key
from passes.simulation.memory.memory_breakdown import MemoryReport
from passes.simulation.memory.storage_program import StorageProgram

STORAGE_PROGRAM: Key[StorageProgram] = Key("storage_program", StorageProgram, scope="graph")
"""A joint graph as runs and storages."""


@dataclass(frozen=True)
class CheckpointDecision:
    """names: of the nodes of forward whose results backward finds; everything else that it reads of forward is computed
    once more. again: how many calls that are; again_us: what they take. forward_bytes, backward_bytes: what a call holds at
    most besides what it is given; after_bytes: while its gradients are used; saved_bytes: from forward to backward. All of
    these count what others take meanwhile. budget_bytes: what a call was to hold at most. seconds: that deciding took.
    offloaded: of `names`, those that are out of the device's memory between forward and backward; offloaded_bytes: how much
    that is; offload_us: what moving it takes. account: all of that by name. ahead: whether what is gathered is started a block
    before it is read."""

    names: frozenset[str]
    again: int
    again_us: float
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    budget_bytes: float
    seconds: float
    offloaded: frozenset[str] = frozenset()
    offloaded_bytes: int = 0
    offload_us: float = 0.0
    account: MemoryReport = MemoryReport()
    after_bytes: int = 0
    ahead: bool = True

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes, self.after_bytes)


CHECKPOINT_DECISION: Key[CheckpointDecision] = Key("checkpoint_decision", CheckpointDecision, scope="graph")
"""Which values of forward are kept for backward."""
PARTITIONER_CHOICE: Key[frozenset[str]] = Key("partitioner_choice", frozenset[str], scope="graph")
"""Names of the nodes that torch's own partitioner would save: the least traffic to memory, whatever it takes of it."""
