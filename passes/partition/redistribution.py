"""Changes of placement: which single collectives are legal from a placement on all axes, and what each costs.

Where several axes split one factor, earlier axes are the outer ones; so an axis may change only if no later axis splits
the factor that it leaves or enters.

    P -> R, M -> R all_reduce    P -> S reduce_scatter    S -> R all_gather    S -> S' all_to_all    R -> S slice
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from passes.costs.base import BUCKET_BYTES
from passes.graph.layouts import Layout, format_layout, legal, local_bytes
from passes.graph.placement_graph import PlacementGraph, Value
from passes.rules.base import PARTIAL, PARTIAL_MAX, REPLICATE, Placement

SLICE_US = 1e-3
"""A slice moves nothing over a link; its tiny cost only breaks ties in favor of fewer steps."""


class CollectivePrices(Protocol):
    def collective_us(self, kind: str, axis: int, nbytes: float) -> float: ...

    def copy_us(self, nbytes: float) -> float: ...


def collective(source: Placement, target: Placement) -> str | None:
    """Name of the collective between two placements on one axis, or None if there is none."""
    if source == PARTIAL:
        return {True: "reduce_scatter"}.get(isinstance(target, tuple), "all_reduce" if target == REPLICATE else None)
    if source == PARTIAL_MAX:
        return "all_reduce" if target == REPLICATE else None
    if target in (PARTIAL, PARTIAL_MAX):
        return None
    if source == REPLICATE:
        return "slice"
    return "all_gather" if target == REPLICATE else "all_to_all"


@dataclass(frozen=True)
class Change:
    """One step of a redistribution: `axis` goes from `source[axis]` to `target[axis]`."""

    source: Layout
    target: Layout
    axis: int
    collective: str
    bytes: float
    cost_us: float


def change(value: Value, layout: Layout, axis: int, target: Placement, sizes: tuple[int, ...],
           prices: CollectivePrices, bucket_bytes: float = 0.0) -> Change | None:
    """The step that takes `axis` of `layout` to `target`, or None if it is not legal.

    bucket_bytes: for the gradient of a parameter, the bytes that are reduced together with it (`bucket_bytes_of`); it
    then pays its part of one collective and of the copy into the bucket (read and write).
    """
    source = layout[axis]
    kind = collective(source, target)
    if source == target or kind is None:
        return None
    if any(p in (source, target) and isinstance(p, tuple) for p in layout[axis + 1 :]):
        return None
    after = (*layout[:axis], target, *layout[axis + 1 :])
    if not legal(value, after, sizes):
        return None
    held = local_bytes(value, layout, sizes)
    if kind == "slice":
        return Change(layout, after, axis, kind, held, SLICE_US)
    moved = held * sizes[axis] if kind == "all_gather" else held
    if kind in ("all_reduce", "reduce_scatter") and moved < bucket_bytes:
        whole = prices.collective_us(kind, axis, bucket_bytes) + 2 * prices.copy_us(bucket_bytes)
        return Change(layout, after, axis, kind, moved, whole * moved / bucket_bytes)
    cost = prices.collective_us(kind, axis, moved)
    # Anything but the outermost dim has to be packed before or unpacked after the collective.
    for p, is_source in ((source, True), (target, False)):
        if isinstance(p, tuple) and not outermost(value, p, layout):
            cost += prices.copy_us(moved if kind != "all_to_all" or is_source else held)
    return Change(layout, after, axis, kind, moved, cost)


def bucket_bytes_of(graph: PlacementGraph) -> float:
    """Bytes of gradients that are reduced together: at most what one bucket holds, at most all there are.

    All gradients of a small model thus pay one latency in all, not a part of one.
    """
    trained = {p for _, p in graph.outputs if p is not None}
    return float(min(BUCKET_BYTES, sum(graph.values[p].bytes for p in trained)))


def outermost(value: Value, placement: tuple[int, int], layout: Layout) -> bool:
    """Whether the parts of a split lie one after another in memory: every dim and factor before it is of local size 1."""
    dim, factor = placement
    outer = 1
    for d in range(dim):
        outer *= value.spec.shape[d]
    for k in range(factor):
        outer *= value.factors[dim][k]
    return outer == 1


def layouts_between(value: Value, ends: Iterable[Layout], sizes: tuple[int, ...]) -> list[Layout]:
    """Layouts that a redistribution may pass through: on every axis what some end has there, or replicated."""
    ends = list(ends)
    per_axis = [list(dict.fromkeys([REPLICATE, *(e[a] for e in ends)])) for a in range(len(sizes))]
    return [layout for layout in itertools.product(*per_axis) if legal(value, layout, sizes)]


def changes_between(value: Value, ends: Iterable[Layout], sizes: tuple[int, ...],
                    prices: CollectivePrices, bucket_bytes: float = 0.0) -> list[Change]:
    """All single steps between the layouts that `ends` span; see `change`."""
    layouts = layouts_between(value, ends, sizes)
    known = set(layouts)
    found = []
    for layout in layouts:
        for axis in range(len(sizes)):
            for target in {x[axis] for x in layouts}:
                step = change(value, layout, axis, target, sizes, prices, bucket_bytes)
                if step is not None and step.target in known:
                    found.append(step)
    return found


def cheapest_route(value: Value, source: Layout, target: Layout, sizes: tuple[int, ...], prices: CollectivePrices,
                   extra: Iterable[Layout] = ()) -> tuple[float, list[Change]] | None:
    """Dijkstra over all legal steps; the route of least cost from `source` to `target`, or None."""
    by_source: dict[Layout, list[Change]] = {}
    for step in changes_between(value, [source, target, *extra], sizes, prices):
        by_source.setdefault(step.source, []).append(step)
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, Change] = {}
    heap = [(0.0, format_layout(source), source)]
    while heap:
        cost, _, layout = heapq.heappop(heap)
        if layout == target:
            route = []
            while layout != source:
                route.append(came[layout])
                layout = came[layout].source
            return cost, route[::-1]
        if cost > best[layout]:
            continue
        for step in by_source.get(layout, ()):
            reached = cost + step.cost_us
            if reached < best.get(step.target, float("inf")):
                best[step.target] = reached
                came[step.target] = step
                heapq.heappush(heap, (reached, format_layout(step.target), step.target))
    return None
