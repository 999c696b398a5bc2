"""Ranks that have posted nothing new for a while: they are gone, or stopped."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpml_compiler.runtime.watchdog.attribution import Heartbeat

LONGEST_S = 30.0
"""A rank posts once a second from a thread of its own, for which a busy machine, or a call that holds Python's lock, may leave
no time."""


@dataclass
class SilentRanks:
    """Told of records again and again, knows of each rank when it posted something new last. limit_s: after what time without
    it is gone."""

    limit_s: float
    heard: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By rank: the last number of posts, and when it was first seen."""

    @staticmethod
    def within(timeout_s: float) -> SilentRanks:
        """For process groups with this timeout."""
        return SilentRanks(min(LONGEST_S, timeout_s))

    def gone(self, records: Mapping[int, Heartbeat], now_s: float, limit_s: float | None = None) -> list[int]:
        """Those of these ranks that are gone by now. One that has come to the end of its script posts no more, and is not."""
        limit_s = self.limit_s if limit_s is None else limit_s
        for rank, record in records.items():
            if self.heard.get(rank, (-1, 0.0))[0] != record.beats:
                self.heard[rank] = record.beats, now_s
        return [rank for rank, record in records.items()
                if not record.ended and now_s - self.heard[rank][1] > limit_s]
