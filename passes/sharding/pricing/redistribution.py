"""Redistribution: the legal single collectives from a layout on all axes, and their costs.

Where several axes split one factor, earlier axes are the outer ones; so an axis may change only if no later axis splits
the factor that it leaves or enters.

    P -> R, M -> R all_reduce    P -> S reduce_scatter    S -> R all_gather    S -> S' all_to_all    R -> S slice
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from passes.cost_model.base import BUCKET_BYTES
from passes.cost_model.cost_terms import Message, Prices, Slice, price
from passes.graph.layouts import Layout, format_layout, legal
from passes.graph.placement_graph import PlacementGraph, Value
from passes.hardware.axis import Axes
from passes.op_rules.base import REPLICATE, Placement
from passes.sharding.pricing.decision_terms import LocalSizes, collective, hop_term


@dataclass(frozen=True)
class PricedHop:
    """One collective or local slice: `axis` goes from `source[axis]` to `target[axis]`."""

    source: Layout
    target: Layout
    axis: int
    term: Message[float] | Slice
    cost: float

    @property
    def collective(self) -> str:
        """Name of the collective; "slice" for a local one."""
        return self.term.collective if isinstance(self.term, Message) else "slice"


def after_hop(value: Value, layout: Layout, axis: int, target: Placement, axes: Axes) -> Layout | None:
    """The layout once `axis` of `layout` has gone to `target`, or None if no single collective does that."""
    source = layout[axis]
    if source == target or collective(source, target) is None:
        return None
    if any(p in (source, target) and isinstance(p, tuple) for p in layout[axis + 1 :]):
        return None
    after = (*layout[:axis], target, *layout[axis + 1 :])
    return after if legal(value, after, axes) else None


def priced_hop(value: Value, layout: Layout, axis: int, target: Placement, axes: Axes, prices: Prices,
               bucket_bytes: float = 0.0) -> PricedHop | None:
    """The hop that takes `axis` of `layout` to `target`, or None if it is not legal.

    bucket_bytes: for the gradient of a parameter, the bytes that are reduced together with it (`bucket_bytes_of`).
    """
    after = after_hop(value, layout, axis, target, axes)
    if after is None:
        return None
    term = hop_term(value, layout, axis, target, LocalSizes(axes), bucket_bytes)
    return PricedHop(layout, after, axis, term, price(term, prices))


def bucket_bytes_of(graph: PlacementGraph, shorter: PlacementGraph | None = None, further: int = 0) -> float:
    """Bytes of gradients that are reduced together: at most one bucket, at most all gradients.

    All gradients of a small model thus pay one latency together, not a fraction of one. shorter, further: of a model with
    `further` more layers than the graph, which has one more than `shorter`.
    """
    own, fewer = (sum(each.values[p].bytes for p in each.gradients) for each in (graph, shorter or graph))
    return float(min(BUCKET_BYTES, own + further * (own - fewer)))


def layouts_between(value: Value, ends: Iterable[Layout], axes: Axes) -> list[Layout]:
    """Layouts that a redistribution may pass through: on every axis, those of the ends, or replicated."""
    ends = list(ends)
    per_axis = [list(dict.fromkeys([REPLICATE, *(e[a] for e in ends)])) for a in range(len(axes))]
    return [layout for layout in itertools.product(*per_axis) if legal(value, layout, axes)]


def hops_between(value: Value, ends: Iterable[Layout], axes: Axes, prices: Prices,
                 bucket_bytes: float = 0.0) -> list[PricedHop]:
    """All single collectives between the layouts that `ends` span."""
    layouts = layouts_between(value, ends, axes)
    known = set(layouts)
    found = []
    for layout in layouts:
        for axis in range(len(axes)):
            for target in dict.fromkeys(x[axis] for x in layouts):  # an order independent of hash seeds
                hop = priced_hop(value, layout, axis, target, axes, prices, bucket_bytes)
                if hop is not None and hop.target in known:
                    found.append(hop)
    return found


def cheapest_route(value: Value, source: Layout, target: Layout, axes: Axes, prices: Prices,
                   extra: Iterable[Layout] = ()) -> tuple[float, list[PricedHop]] | None:
    """Cheapest route from `source` to `target` over all legal collectives (Dijkstra), or None."""
    by_source: dict[Layout, list[PricedHop]] = {}
    for hop in hops_between(value, [source, target, *extra], axes, prices):
        by_source.setdefault(hop.source, []).append(hop)
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, PricedHop] = {}
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
        for hop in by_source.get(layout, ()):
            reached = cost + hop.cost
            if reached < best.get(hop.target, float("inf")):
                best[hop.target] = reached
                came[hop.target] = hop
                heapq.heappush(heap, (reached, format_layout(hop.target), hop.target))
    return None
