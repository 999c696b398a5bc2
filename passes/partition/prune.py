"""Which choices of a group are of no use, because another one and the collectives that turn its layouts into those of the first
are no dearer, however the other axes are split.

That is how `passes.solve.reduce` drops what is dominated, but before choices are combined over axes, where 400 on each of two
axes would be 160,000. What it costs to turn one layout into another is taken without what the other axes split, and with all
that they could: prices lie in between, as they grow with bytes. A slice is free.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from passes.costs.terms import Prices
from passes.graph.layouts import Layout, format_layout
from passes.graph.placement_graph import PlacementGraph, Value
from passes.machine.axis import Axes
from passes.partition.combined import Combination, Combined
from passes.partition.groups import Group
from passes.partition.redistribution import hops_between
from passes.partition.zero import weights_of
from passes.solve.allowance import Allowance
from passes.solve.paths import Paths
from passes.solve.problem import Arc

MOST_COMPARED = 2000
"""Combinations that are compared: of more, the dearest are not looked at: comparing takes a number for every two."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PartOfMesh:
    """Some axes of a mesh, its prices, and those axes' numbers. others: by how much the other axes can split."""

    axes: Axes
    prices: Prices
    first: int = 0
    others: int = 1

    def part(self, start: int, stop: int) -> PartOfMesh:
        axes = self.axes[start:stop]
        return PartOfMesh(axes, self.prices, self.first + start, prod(a.size for a in self.axes) // prod(a.size for a in axes))

    def priced(self) -> list[Prices]:
        """With nothing split by the other axes, and with everything."""
        return [_Shared(self.prices, self.first, 1 / share) for share in dict.fromkeys((1, self.others))]


class _Shared:
    """Prices of a part of a mesh: with the number of its first axis there, and of a share of all bytes and FLOPs."""

    def __init__(self, prices: Prices, first: int, share: float):
        self.prices, self.first, self.share = prices, first, share
        self.algebra, self.keyed = prices.algebra, prices.keyed

    def kernel(self, flops: Any, nbytes: Any, dtype: str, kind: str, key: str = "") -> Any:
        return self.prices.kernel(flops * self.share, nbytes * self.share, dtype, kind, key)

    def collective(self, kind: str, axis: int, nbytes: Any) -> Any:
        return self.prices.collective(kind, axis + self.first, nbytes * self.share)

    def update(self, elements: Any, dtype: str) -> Any:
        return self.prices.update(elements * self.share, dtype)


def most_useful(combinations: list[Combination], group: Group, graph: PlacementGraph, mesh: PartOfMesh, most: int,
                allowance: Allowance) -> list[Combination]:
    """At most so many of the combinations that fit, cheapest first: of those that no other one can replace, and
    the one that splits nothing. mesh: the axes that they are over."""
    priced = [Combined(group, graph, mesh.axes, prices) for prices in mesh.priced()]
    allowance.spend("combination", len(priced) * len(combinations))
    found = [each for each in combinations if priced[0].fits(each)]
    costs = np.array([[each.cost(combination) for combination in found] for each in priced])
    rank = np.argsort(costs.sum(axis=0), kind="stable")[:MOST_COMPARED]
    found, costs = [found[k] for k in rank], costs[:, rank]
    allowance.spend("comparison", len(priced) * len(found) ** 2 * (1 + len(group.inputs) + len(group.outputs)))
    weights = weights_of(graph)
    replaces = np.ones((len(found), len(found)), dtype=bool)
    ports = [priced[0].ports(each) for each in found]
    for each, cost in zip(priced, costs, strict=True):
        loss = cost[:, None] - cost[None, :]  # (a, b): what a, made to look like b, costs more than b
        for k, v in enumerate(group.inputs):
            index, turning = _turning(graph, v, [inputs[k] for inputs, _ in ports], mesh.axes, each.prices, weights)
            loss += turning[np.ix_(index, index)].T
        for k, v in enumerate(group.outputs):
            index, turning = _turning(graph, v, [outputs[k] for _, outputs in ports], mesh.axes, each.prices, weights)
            loss += turning[np.ix_(index, index)]
        replaces &= loss <= _ROUNDING * cost[None, :]
    held = np.array([priced[0].saved_bytes(each) for each in found])
    replaces &= held[:, None] <= held[None, :]
    np.fill_diagonal(replaces, False)
    kept = np.ones(len(found), dtype=bool)
    for k in reversed(range(len(found))):  # the dearest first, so that of equals the cheapest stays
        kept[k] = not (replaces[:, k] & kept).any()
    useful = np.flatnonzero(kept)
    whole = [k for k, (inputs, outputs) in enumerate(ports) if not any(
        isinstance(p, tuple) or p in ("P", "M") for layout in inputs + outputs for p in layout)]
    return [found[k] for k in sorted({*useful[:most].tolist(), *whole[:1]})]


def _turning(graph: PlacementGraph, v: int, layouts: Sequence[Layout], axes: Axes, prices: Prices, weights: set[int],
             ) -> tuple[np.ndarray, np.ndarray]:
    """(index of each layout, what it costs to turn one with an index into another). Parameters are not gathered: that may be
    forbidden."""
    ends = list(dict.fromkeys(layouts))
    numbers = {layout: k for k, layout in enumerate(ends)}
    index = np.array([numbers[layout] for layout in layouts], dtype=int)
    table = _table(graph.values[v], ends, axes, prices, v in weights)
    return index, table


def _table(value: Value, ends: Sequence[Layout], axes: Axes, prices: Prices, stays: bool) -> np.ndarray:
    if len(ends) == 1:
        return np.zeros((1, 1))
    arcs = [Arc(format_layout(hop.source), format_layout(hop.target), 0.0 if hop.collective == "slice" else hop.cost)
            for hop in hops_between(value, ends, axes, prices)
            if not (stays and hop.collective in ("all_gather", "all_to_all"))]
    labels = [format_layout(layout) for layout in ends]
    paths = Paths(arcs, labels)
    rows = [paths.index[label] for label in labels]
    return paths.cost[np.ix_(rows, rows)]
