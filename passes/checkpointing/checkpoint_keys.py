"""Annotations of activation checkpointing."""
from __future__ import annotations

from dataclasses import dataclass

from passes.annotations import Key
from passes.simulation.memory.memory_breakdown import MemoryReport
from passes.simulation.memory.storage_program import StorageProgram

STORAGE_PROGRAM: Key[StorageProgram] = Key("storage_program", StorageProgram, scope="graph")
"""The storage program of a joint graph: its operations and storages."""


@dataclass(frozen=True)
class CheckpointDecision:
    """names: forward nodes whose results are saved; every other forward value that backward reads is recomputed. recomputed:
    number of recomputed calls; recompute_us: their time. forward_bytes, backward_bytes: peak bytes of a call besides its
    inputs; after_bytes: while its gradients are used; saved_bytes: between forward and backward. All of these include other
    users' bytes meanwhile. budget_bytes: the limit for a call. seconds: time of the decision. offloaded: those of `names` that
    are out of the device's memory between forward and backward; offloaded_bytes: their size; offload_us: time of moving them.
    account: a report by name. ahead: gathers are prefetched one block before they are read."""

    names: frozenset[str]
    recomputed: int
    recompute_us: float
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
"""Forward values that are saved for backward."""
PARTITIONER_CHOICE: Key[frozenset[str]] = Key("partitioner_choice", frozenset[str], scope="graph")
"""Names of the nodes that torch's own partitioner would save: least memory traffic, whatever the bytes."""
