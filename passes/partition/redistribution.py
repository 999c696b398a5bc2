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

from passes.costs.base import BUCKET_BYTES
from passes.costs.terms import Message, Prices, Slice, price
from passes.graph.layouts import Layout, format_layout, legal
from passes.graph.placement_graph import PlacementGraph, Value
from passes.machine.axis import Axes
from passes.partition.charges import LocalSizes, collective, step_term
from passes.rules.base import REPLICATE, Placement


@dataclass(frozen=True)
class Change:
    """One step of a redistribution: `axis` goes from `source[axis]` to `target[axis]`."""

    source: Layout
    target: Layout
    axis: int
    term: Message[float] | Slice
    cost: float

    @property
    def collective(self) -> str:
        """"slice" for a local step."""
        return self.term.collective if isinstance(self.term, Message) else "slice"


def after_step(value: Value, layout: Layout, axis: int, target: Placement, axes: Axes) -> Layout | None:
    """The layout once `axis` of `layout` has gone to `target`, or None if no single collective does that."""
    source = layout[axis]
    if source == target or collective(source, target) is None:
        return None
    if any(p in (source, target) and isinstance(p, tuple) for p in layout[axis + 1 :]):
        return None
    after = (*layout[:axis], target, *layout[axis + 1 :])
    return after if legal(value, after, axes) else None


def change(value: Value, layout: Layout, axis: int, target: Placement, axes: Axes, prices: Prices,
           bucket_bytes: float = 0.0) -> Change | None:
    """The step that takes `axis` of `layout` to `target`, or None if it is not legal.

    bucket_bytes: for the gradient of a parameter, the bytes that are reduced together with it (`bucket_bytes_of`).
    """
    after = after_step(value, layout, axis, target, axes)
    if after is None:
        return None
    term = step_term(value, layout, axis, target, LocalSizes(axes), bucket_bytes)
    return Change(layout, after, axis, term, price(term, prices))


def bucket_bytes_of(graph: PlacementGraph) -> float:
    """Bytes of gradients that are reduced together: at most what one bucket holds, at most all there are.

    All gradients of a small model thus pay one latency in all, not a part of one.
    """
    trained = {p for _, p in graph.outputs if p is not None}
    return float(min(BUCKET_BYTES, sum(graph.values[p].bytes for p in trained)))


def layouts_between(value: Value, ends: Iterable[Layout], axes: Axes) -> list[Layout]:
    """Layouts that a redistribution may pass through: on every axis what some end has there, or replicated."""
    ends = list(ends)
    per_axis = [list(dict.fromkeys([REPLICATE, *(e[a] for e in ends)])) for a in range(len(axes))]
    return [layout for layout in itertools.product(*per_axis) if legal(value, layout, axes)]


def changes_between(value: Value, ends: Iterable[Layout], axes: Axes,
                    prices: Prices, bucket_bytes: float = 0.0) -> list[Change]:
    """All single steps between the layouts that `ends` span; see `change`."""
    layouts = layouts_between(value, ends, axes)
    known = set(layouts)
    found = []
    for layout in layouts:
        for axis in range(len(axes)):
            for target in dict.fromkeys(x[axis] for x in layouts):  # in an order that no hash seed changes
                step = change(value, layout, axis, target, axes, prices, bucket_bytes)
                if step is not None and step.target in known:
                    found.append(step)
    return found


def cheapest_route(value: Value, source: Layout, target: Layout, axes: Axes, prices: Prices,
                   extra: Iterable[Layout] = ()) -> tuple[float, list[Change]] | None:
    """Dijkstra over all legal steps; the route of least cost from `source` to `target`, or None."""
    by_source: dict[Layout, list[Change]] = {}
    for step in changes_between(value, [source, target, *extra], axes, prices):
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
            reached = cost + step.cost
            if reached < best.get(step.target, float("inf")):
                best[step.target] = reached
                came[step.target] = step
                heapq.heappush(heap, (reached, format_layout(step.target), step.target))
    return None
