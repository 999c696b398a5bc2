"""In which layouts a parameter may be stored, and in which it comes to whoever reads it: what a level of ZeRO allows.

A parameter is stored with its gradient and its optimizer state, whole or in parts. What reads it whole where it is in parts
gathers it: in forward, and in backward once more (level 3). Or the runtime gathers it, once after each step of the optimizer,
and holds the result beside the part until the optimizer changes that (level 2, with the part more than the textbook's, which
has no more than the whole; level 1 moves as much, holds more, and is read as 2). At level 0 nothing is gathered.
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.graph.layouts import Layout, legal
from passes.graph.placement_graph import PlacementGraph, Value
from passes.hardware.axis import Axes, Axis
from passes.op_rules.base import REPLICATE

Level = Literal[0, 2, 3]


@dataclass(frozen=True)
class ZeroRules:
    """level: of all parameters; None where each may have its own. holds: whether what is gathered may be held."""

    level: Level | None = None
    holds: bool = False

    def storage(self, value: Value, trained: bool, axes: Axes) -> list[Layout]:
        """Layouts that a parameter may be stored in."""
        per_axis = [[REPLICATE, *_splits(value, axis)] for axis in axes]
        layouts = [p for p in itertools.product(*per_axis) if _one_factor_a_dim(p) and legal(value, p, axes)]
        level = 0 if self.level == 2 and not trained else self.level  # a part of what nobody changes saves nothing
        if level == 0:
            return [p for p in layouts if not any(axis.name == "dp" and q != REPLICATE for q, axis in zip(p, axes))]
        return layouts if level is None else _most_split(layouts, axes)

    def kept(self, layouts: Iterable[Layout], axes: Axes) -> list[Layout]:
        """Of these layouts, those in which what forward makes of a parameter alone, as a cast, may be kept for backward."""
        return _most_split(list(layouts), axes) if self.level == 3 else list(layouts)

    def held(self, stored: Layout) -> Iterator[Layout]:
        """Layouts in which it may be held besides, one or more of the axes gathered."""
        split = [a for a, p in enumerate(stored) if p != REPLICATE]
        for count in range(1, len(split) + 1 if self.holds else 0):
            for gathered in itertools.combinations(split, count):
                yield tuple(REPLICATE if a in gathered else p for a, p in enumerate(stored))

    def gathers_again(self, trained: bool, placed: bool) -> bool:
        """Whether a graph may gather a parameter by itself. placed: another graph has decided how it is stored."""
        return self.level in (None, 3) or (placed and not (self.level == 2 and trained))

    @property
    def scatters(self) -> bool:
        """Whether gradients of parameters in parts come in parts out of their reduction: never whole, to be cut then."""
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
    """Along a `tp` axis it is the work that is split, which no level of ZeRO has a say in."""

    def parts(layout: Layout) -> int:
        return sum(isinstance(p, tuple) and axis.name != "tp" for p, axis in zip(layout, axes))

    most = max(map(parts, layouts))
    return [p for p in layouts if parts(p) == most]


def weights_of(graph: PlacementGraph, parameters: set[int] | None = None) -> set[int]:
    """Parameters as operations read them: as they are stored, or through views and casts. parameters: these alone."""
    found = {v.index for v in graph.values if v.kind == "parameter"} if parameters is None else set(parameters)
    for op in graph.operations:
        if not op.heavy and len(op.inputs) == 1 and op.inputs[0] in found:
            found.update(op.outputs)
    return found
