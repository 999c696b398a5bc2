"""Drop dominated choices of a group: those that another choice, plus collectives between the two boundaries, replaces at no
greater cost, however the other axes are split.

This is the dominance rule of `passes.solver.reduction`, applied before choices are combined over axes, where 400 on each of
two axes would be 160,000. The cost of a redistribution is taken both without the splits of the other axes and with
all possible ones: prices lie in between, since they grow with bytes. A slice is free.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from passes.cost_model.cost_terms import Prices
from passes.graph.layouts import Layout, format_layout
from passes.graph.placement_graph import PlacementGraph, Value
from passes.hardware.axis import Axes
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.pricing.redistribution import hops_between
from passes.sharding.strategies.strategy_product import Combination, Ports, StrategyProduct
from passes.solver.cheapest_paths import Paths
from passes.solver.problem import Arc
from passes.solver.work_limit import WorkLimit

MOST_COMPARED = 2000
"""Limit of combinations that are compared: of more, the most expensive are dropped."""
AT_ONCE = 128
"""Combinations compared at once with the cheaper survivors."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SubMeshPrices:
    """Some axes of a mesh, its prices, and those axes' numbers. others: the largest split by the other axes."""

    axes: Axes
    prices: Prices
    first: int = 0
    others: int = 1

    def part(self, start: int, stop: int) -> SubMeshPrices:
        axes = self.axes[start:stop]
        return SubMeshPrices(axes, self.prices, self.first + start,
                             prod(a.size for a in self.axes) // prod(a.size for a in axes))

    def combined(self, group: OpGroup, graph: PlacementGraph) -> list[StrategyProduct]:
        """Priced with nothing split by the other axes, and with everything."""
        return [StrategyProduct(group, graph, self.axes, _ScaledPrices(self.prices, self.first, 1 / share))
                for share in dict.fromkeys((1, self.others))]


class _ScaledPrices:
    """Prices on part of a mesh: offset of its first axis, and share of all bytes and FLOPs."""

    def __init__(self, prices: Prices, first: int, share: float):
        self.prices, self.first, self.share = prices, first, share
        self.algebra, self.keyed = prices.algebra, prices.keyed

    def kernel(self, flops: Any, nbytes: Any, dtype: str, kind: str, key: str = "") -> Any:
        return self.prices.kernel(flops * self.share, nbytes * self.share, dtype, kind, key)

    def collective(self, kind: str, axis: int, nbytes: Any) -> Any:
        return self.prices.collective(kind, axis + self.first, nbytes * self.share)

    def update(self, elements: Any, dtype: str) -> Any:
        return self.prices.update(elements * self.share, dtype)


def undominated(combinations: list[Combination], priced: Sequence[StrategyProduct], most: int, allowance: WorkLimit,
                ) -> list[Combination]:
    """The cheapest `most` compatible combinations that are not dominated, and the replicated one.
    priced: by one price or more, on the same axes."""
    group, graph, axes = priced[0].group, priced[0].graph, priced[0].axes
    allowance.spend("combination", len(priced) * len(combinations))
    found = [each for each in combinations if priced[0].fits(each)]
    costs = np.array([[each.cost(combination) for combination in found] for each in priced])
    rank = np.argsort(costs.sum(axis=0), kind="stable")[:MOST_COMPARED]
    found, costs = [found[k] for k in rank], costs[:, rank]
    ports = [priced[0].ports(each) for each in found]
    turnings = [_turnings(group, graph, ports, axes, each.prices, graph.weights) for each in priced]
    held = np.array([priced[0].saved_bytes(each) for each in found])

    def replaces(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """(a, b): whether a dominates b."""
        allowance.spend("comparison", len(priced) * len(a) * len(b) * (1 + len(group.inputs) + len(group.outputs)))
        found = held[a][:, None] <= held[b][None, :]
        for cost, ends in zip(costs, turnings, strict=True):
            loss = cost[a][:, None] - cost[b][None, :]  # extra cost of a, once redistributed to look like b
            for index, turning in ends:
                loss += turning[np.ix_(index[a], index[b])]
            found &= loss <= _ROUNDING * cost[b][None, :]
        return found & (a[:, None] != b[None, :])

    kept = np.arange(0)  # only choices that cost no more can dominate
    for block in np.split(np.arange(len(found)), range(AT_ONCE, len(found), AT_ONCE)):
        block = block[~replaces(kept, block).any(axis=0)]
        table, left = replaces(block, block), np.ones(len(block), dtype=bool)
        for k in reversed(range(len(block))):  # the most expensive first, so that of equals the cheapest stays
            left[k] = not (table[:, k] & left).any()
        kept = np.concatenate([kept, block[left]])
        if len(kept) >= most:
            break
    whole = [k for k, (inputs, outputs) in enumerate(ports) if not any(
        isinstance(p, tuple) or p in ("P", "M") for layout in inputs + outputs for p in layout)]
    return [found[k] for k in sorted({*kept[:most].tolist(), *whole[:1]})]


def _turnings(group: OpGroup, graph: PlacementGraph, ports: Sequence[Ports], axes: Axes, prices: Prices,
              weights: set[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each value at the boundary: the index of each combination's layout, and the cost of redistributing from the
    first index to the second. Parameters are not gathered: that may be forbidden."""
    turnings = []
    for side, values in enumerate((group.inputs, group.outputs)):
        for k, v in enumerate(values):
            numbers: dict[Layout, int] = {}
            index = np.array([numbers.setdefault(port[side][k], len(numbers)) for port in ports], dtype=int)
            table = _table(graph.values[v], list(numbers), axes, prices, v in weights)
            turnings.append((index, table if side else table.T))
    return turnings


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
