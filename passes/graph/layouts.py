"""Layouts: the placement of a value on every axis, and the shard that one rank has."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from passes.graph.placement_graph import Value
from passes.hardware.axis import Axes
from passes.op_rules.base import REPLICATE, Placement, format_placement, parse_placement

Layout = tuple[Placement, ...]
"""One placement per axis. Where several axes split one factor, earlier axes are the outer ones, as in DTensor."""


StoredLayout = tuple[Literal["R"] | tuple[int, int], ...]
"""Placement of a stored tensor on every axis, "R" or (dim, outer): the dim, seen as (outer, inner), is split along inner.
Outer is 1 for DTensor's `Shard(dim)`, and 3 for fused query, key and value weights that are split by heads. Unlike the
index of a factor, it does not depend on how one graph's views split the dim."""


def format_layout(layout: Layout) -> str:
    return ",".join(format_placement(p) for p in layout)


def parse_layout(text: str) -> Layout:
    """Inverse of `format_layout`; raises ValueError."""
    return tuple(parse_placement(t) for t in text.split(",")) if text else ()


def stored_layout(value: Value, layout: Layout) -> StoredLayout:
    """The layout in which a tensor is stored, independent of this graph's factors."""
    return tuple((p[0], math.prod(value.factors[p[0]][:p[1]])) if isinstance(p, tuple) else REPLICATE  # type: ignore[misc]
                 for p in layout)


def as_layout(value: Value, stored: StoredLayout) -> Layout | None:
    """Inverse of `stored_layout`; None where this graph's views do not split the dim there."""
    found: list[Placement] = []
    for p in stored:
        if p == REPLICATE:
            found.append(REPLICATE)
            continue
        row = value.factors[p[0]]
        factor = next((k for k in range(len(row)) if math.prod(row[:k]) == p[1]), None)
        if factor is None:
            return None
        found.append((p[0], factor))
    return tuple(found)


def layouts_of_stored(values: Sequence[Value], stored: Mapping[str, StoredLayout]) -> dict[str, Layout]:
    """Layouts by value name, of the stored values whose shards the graph can use."""
    found = {v.name: as_layout(v, stored[v.name]) for v in values if v.name in stored}
    return {name: layout for name, layout in found.items() if layout is not None}


def may_stay_sharded(placement: Placement) -> bool:
    """True if a graph output may keep this placement on an axis: replicated, or contiguous shards of a dim."""
    return placement == REPLICATE or (isinstance(placement, tuple) and placement[1] == 0)


def legal(value: Value, layout: Layout, axes: Axes) -> bool:
    """True if the axes divide every factor that they split."""
    split: dict[tuple[int, int], int] = {}
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            split[p] = split.get(p, 1) * axis.size
    return all(value.factors[d][k] % n == 0 for (d, k), n in split.items())


def local_shape(value: Value, layout: Layout, axes: Axes) -> tuple[int, ...]:
    """Shape of one rank's shard of a value, in a layout that is `legal`."""
    shape = list(value.spec.shape)
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            shape[p[0]] //= axis.size
    return tuple(shape)


def local_bytes(value: Value, layout: Layout, axes: Axes) -> float:
    """Bytes of one rank's shard."""
    share = 1
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            share *= axis.size
    return value.bytes / share


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if elements of a tensor share memory; dims of one element do not count."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape) if size > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False
