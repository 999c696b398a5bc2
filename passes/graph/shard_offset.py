"""Where a rank's part of a dim begins, as it follows from where the rank is in the mesh."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardOffset:
    """`count` elements for each part before this rank's.

    strides: (name of a process group, how many parts are between two neighbours in it); the number of a rank's part is the
    sum of its coordinates in these groups, each times its stride.
    """

    count: int
    strides: tuple[tuple[str, int], ...]

    def at(self, coordinates: Mapping[str, int]) -> int:
        """coordinates: of one rank, by the name of the process group."""
        return self.count * sum(coordinates[name] * stride for name, stride in self.strides)
