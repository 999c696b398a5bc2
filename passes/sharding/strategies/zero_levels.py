"""Layouts in which a parameter may be stored, and in which readers see it, at each level of ZeRO.

A parameter is stored with its gradient and its optimizer state, replicated or sharded. Readers of the whole parameter
gather it: in forward, and once more in backward (level 3). Or the runtime gathers it once after each optimizer step,
and holds the result beside the shard until the optimizer changes it (level 2; the textbook's has only the whole parameter, this
one the shard as well; level 1 moves as much, holds more, and is read as 2). At level 0 nothing is gathered.
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.graph.layouts import Layout, legal
from passes.graph.placement_graph import Value
from passes.hardware.axis import Axes, Axis
from passes.hardware.gradient_compression import steps_apart
from passes.op_rules.base import REPLICATE

Level = Literal[0, 2, 3]


@dataclass(frozen=True)
class ZeroRules:
    """level: of all parameters; None where each may have its own. holds: gathered parameters may be held."""

    level: Level | None = None
    holds: bool = False

    def storage(self, value: Value, trained: bool, axes: Axes) -> list[Layout]:
        """Layouts that a parameter may be stored in."""
        per_axis = [[REPLICATE, *([] if steps_apart(axis.compression) else _splits(value, axis))] for axis in axes]
        layouts = [p for p in itertools.product(*per_axis) if _one_factor_a_dim(p) and legal(value, p, axes)]
        level = 0 if self.level == 2 and not trained else self.level  # sharding a frozen parameter saves nothing here
        if level == 0:
            return [p for p in layouts if not any(axis.name == "dp" and q != REPLICATE for q, axis in zip(p, axes))]
        return layouts if level is None else _most_split(layouts, axes)

    def kept(self, layouts: Iterable[Layout], axes: Axes) -> list[Layout]:
        """Those of the layouts in which a value computed from a parameter alone, such as a cast, may be saved for
        backward."""
        return _most_split(list(layouts), axes) if self.level == 3 else list(layouts)

    def held(self, stored: Layout) -> Iterator[Layout]:
        """Layouts in which it may also be held, with one or more of the axes gathered."""
        split = [a for a, p in enumerate(stored) if p != REPLICATE]
        for count in range(1, len(split) + 1 if self.holds else 0):
            for gathered in itertools.combinations(split, count):
                yield tuple(REPLICATE if a in gathered else p for a, p in enumerate(stored))

    def gathers_again(self, trained: bool, placed: bool) -> bool:
        """True if a graph may gather a parameter itself. placed: another graph has decided its storage."""
        return self.level in (None, 3) or (placed and not (self.level == 2 and trained))

    @property
    def scatters(self) -> bool:
        """True if gradients of sharded parameters are reduce-scattered, never all-reduced and then cut."""
        return self.level in (2, 3)


def _splits(value: Value, axis: Axis) -> list[tuple[int, int]]:
    """Factors that an axis may split, at most one of each dim: the outer one, or the next that the axis divides.

    So fused query, key and value weights, of 3 x heads x width rows, are split by heads. Along `dp`, where only storage is
    split, an outer factor of any dim does as well.
    """
    found = [(dim, next((k for k, size in enumerate(row) if size % axis.size == 0), None))
             for dim, row in enumerate(value.factors)]
    outer = [(dim, factor) for dim, factor in found if factor == 0]
    return outer if outer and axis.name == "dp" else [(dim, factor) for dim, factor in found if factor is not None]


def _one_factor_a_dim(layout: Layout) -> bool:
    """True if no dim is split along two of its factors: the runtime has no placement for that."""
    split = {p for p in layout if isinstance(p, tuple)}
    return len(split) == len({dim for dim, _ in split})


def _most_split(layouts: Sequence[Layout], axes: Axes) -> list[Layout]:
    """Keep the most sharded layouts. A `tp` axis splits the work, which no level of ZeRO controls."""

    def parts(layout: Layout) -> int:
        return sum(isinstance(p, tuple) and axis.name != "tp" for p, axis in zip(layout, axes))

    most = max(map(parts, layouts))
    return [p for p in layouts if parts(p) == most]
