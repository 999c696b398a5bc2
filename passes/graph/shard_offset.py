"""Start of a rank's shard of a dim, as a function of the rank's mesh coordinates."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardOffset:
    """`count` elements per shard before this rank's.

    strides: (name of a process group, number of shards between two neighbors in it); the index of a rank's shard is the
    sum of its coordinates in these groups, each times its stride.
    """

    count: int
    strides: tuple[tuple[str, int], ...]
    first: int | None = None
    """The offset of this rank, where shards have different sizes; `strides` is empty then."""

    def at(self, coordinates: Mapping[str, int]) -> int:
        """The offset of one rank. coordinates: by the name of the process group."""
        if self.first is not None:
            return self.first
        return self.count * sum(coordinates[name] * stride for name, stride in self.strides)
