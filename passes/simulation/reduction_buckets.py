"""Buckets of gradient reductions: one collective for as many gradients as fit, like the runtime's buckets."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from passes.cost_model.base import BUCKET_BYTES
from passes.cost_model.cost_terms import REDUCING
from passes.simulation.rank_program import RankProgram
from passes.simulation.step_graph import Transfer, TransferHop

Reduced = Callable[[Transfer, int, int, int, str], None]
"""(leg, index of its collective, entry that reduced it, layer, label)."""


@dataclass
class _ReductionBucket:
    """Gradients of one kind that are reduced together."""

    us: float = 0.0
    nbytes: float = 0.0
    link_j: float = 0.0
    after: set[int] = field(default_factory=set)
    members: list[tuple[Transfer, int, int, str]] = field(default_factory=list)


class ReductionBuckets:
    """Open buckets by index of the collective, kind, axis and dtype. done: called for every member of a closed bucket."""

    def __init__(self, program: RankProgram, done: Reduced):
        self.program, self.done = program, done
        self.open: dict[tuple[int, str, str, str], _ReductionBucket] = {}

    @staticmethod
    def takes(hop: TransferHop) -> bool:
        return hop.collective in REDUCING and bool(hop.bytes)

    def add(self, leg: Transfer, k: int, ready: int | None, layer: int, label: str) -> None:
        """Add collective k of a gradient's reduction, which may start after entry `ready`."""
        hop = leg.hops[k]
        key = (k, hop.collective, hop.axis, leg.dtype)
        if key in self.open and self.open[key].nbytes + hop.bytes > BUCKET_BYTES:
            self._close(key)
        bucket = self.open.setdefault(key, _ReductionBucket())
        bucket.us += hop.us
        bucket.nbytes += hop.bytes
        bucket.link_j += hop.link_j
        bucket.after |= set() if ready is None else {ready}
        bucket.members.append((leg, k, layer, label))

    def flush(self) -> None:
        while self.open:
            self._close(min(self.open))

    def _close(self, key: tuple[int, str, str, str]) -> None:
        bucket = self.open.pop(key)
        more = len(bucket.members) - 1
        label = bucket.members[0][3] + (f" and {more} more" if more else "")
        index = self.program.communicate(label, key[1], bucket.us, sorted(bucket.after), bucket.link_j)
        for leg, k, layer, name in bucket.members:
            self.done(leg, k, index, layer, name)
