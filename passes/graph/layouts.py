"""Layouts: the placement of a value on every axis, and what one rank then holds."""
from __future__ import annotations

from passes.graph.placement_graph import Value
from passes.machine.axis import Axes
from passes.rules.base import REPLICATE, Placement, format_placement, parse_placement

Layout = tuple[Placement, ...]
"""One placement per axis. Where several axes split one factor, earlier axes are the outer ones, as in DTensor."""


def format_layout(layout: Layout) -> str:
    return ",".join(format_placement(p) for p in layout)


def parse_layout(text: str) -> Layout:
    """Inverse of `format_layout`; raises ValueError."""
    return tuple(parse_placement(t) for t in text.split(",")) if text else ()


def may_be_left(placement: Placement) -> bool:
    """Whether what a graph returns may stay so on an axis: whole, or its dim in parts, one after the other."""
    return placement == REPLICATE or (isinstance(placement, tuple) and placement[1] == 0)


def legal(value: Value, layout: Layout, axes: Axes) -> bool:
    """Whether every split factor divides by the axes that split it."""
    split: dict[tuple[int, int], int] = {}
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            split[p] = split.get(p, 1) * axis.size
    return all(value.factors[d][k] % n == 0 for (d, k), n in split.items())


def local_shape(value: Value, layout: Layout, axes: Axes) -> tuple[int, ...]:
    """Shape of the part of a value that one rank holds, in a layout that is `legal`."""
    shape = list(value.spec.shape)
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            shape[p[0]] //= axis.size
    return tuple(shape)


def local_bytes(value: Value, layout: Layout, axes: Axes) -> float:
    """Bytes that one rank holds."""
    share = 1
    for p, axis in zip(layout, axes):
        if isinstance(p, tuple):
            share *= axis.size
    return value.bytes / share
