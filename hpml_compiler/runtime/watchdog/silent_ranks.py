"""Detect ranks that have stopped posting heartbeats."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpml_compiler.runtime.watchdog.attribution import Heartbeat

LONGEST_S = 30.0
"""A rank posts once a second from a thread, which a busy machine, or a call that holds the GIL, may delay."""


@dataclass
class SilentRanks:
    """Tracks when each rank last posted a new heartbeat. limit_s: time without one after which a rank counts as gone."""

    limit_s: float
    heard: dict[int, tuple[int, float]] = field(default_factory=dict)
    """rank -> latest number of posts, and when it was first seen."""

    @staticmethod
    def within(timeout_s: float) -> SilentRanks:
        """Create one for process groups with this timeout, in seconds."""
        return SilentRanks(min(LONGEST_S, timeout_s))

    def gone(self, records: Mapping[int, Heartbeat], now_s: float, limit_s: float | None = None) -> list[int]:
        """Ranks that count as gone now. A rank that has ended its script posts no more and does not count."""
        limit_s = self.limit_s if limit_s is None else limit_s
        for rank, record in records.items():
            if self.heard.get(rank, (-1, 0.0))[0] != record.beats:
                self.heard[rank] = record.beats, now_s
        return [rank for rank, record in records.items()
                if not record.ended and now_s - self.heard[rank][1] > limit_s]
