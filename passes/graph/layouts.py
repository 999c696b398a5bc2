"""Layouts: the placement of a value on every axis, and the shard that one rank has."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from passes.graph.placement_graph import Value
from passes.hardware.axis import Axes, Axis
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


def may_stay_sharded(value: Value, placement: Placement, axis: Axis) -> bool:
    """True if a graph output may keep this placement on an axis: replicated, or contiguous shards of a dim, of equal sizes."""
    return placement == REPLICATE or (
        isinstance(placement, tuple) and placement[1] == 0 and not is_unequal(value, placement, axis))


def legal(value: Value, layout: Layout, axes: Axes) -> bool:
    """True if the axes divide every factor that they split."""
    if any(axis.rows for axis in axes):
        return _legal_with_rows(value, layout, axes)
    split: dict[tuple[int, int], int] = {}
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            split[p] = split.get(p, 1) * axis.size
    return all(value.factors[d][k] % n == 0 for (d, k), n in split.items())


def _legal_with_rows(value: Value, layout: Layout, axes: Axes) -> bool:
    """The same where ranks have unequal rows. Parameters are stored in equal shards, so none is split along the batch then."""
    sizes: dict[tuple[int, int], set[int]] = {}
    for p, axis in zip(layout, axes):
        if not isinstance(p, tuple):
            continue
        of_batch = p in value.batch
        if of_batch and axis.rows and value.kind == "parameter":
            return False
        parts = [axis.parts(size, of_batch) for size in sizes.get(p, {value.factors[p[0]][p[1]]})]
        if not all(parts):
            return False
        sizes[p] = {size for each in parts for size in each}
    return True


def is_unequal(value: Value, placement: Placement, axis: Axis) -> bool:
    """True if the ranks along an axis have shards of different sizes in this placement."""
    return isinstance(placement, tuple) and bool(axis.rows) and placement in value.batch


def local_shape(value: Value, layout: Layout, axes: Axes, at: Sequence[int] = ()) -> tuple[int, ...]:
    """Shape of one rank's shard of a value, in a layout that is `legal`. at: the rank's coordinates; by default those of the
    rank with most rows."""
    shape = list(value.spec.shape)
    for k, (p, axis) in enumerate(zip(layout, axes)):
        if isinstance(p, tuple):
            shape[p[0]] = axis.part(shape[p[0]], p in value.batch, at[k] if at else None)
    return tuple(shape)


def local_bytes(value: Value, layout: Layout, axes: Axes) -> float:
    """Bytes of one rank's shard, the largest where ranks have unequal rows."""
    share = 1
    more = 1.0
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            share *= axis.size
            if axis.rows and p in value.batch:
                more *= axis.share() * axis.size
    return value.bytes / share * more


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if elements of a tensor share memory; dims of one element do not count."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape) if size > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False
