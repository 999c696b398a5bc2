"""Cheapest paths between all labels of an edge."""
from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from passes.solver.problem import Arc, Label

_BLOCK = 4_000_000  # numbers held at once while relaxing (32 MB)


class Paths:
    """Cheapest paths through a set of arcs; among equally cheap ones, one with the fewest arcs.

    index: label -> row and column of `cost`; None ("nothing") has the last row and column.
    cost: (labels + 1, labels + 1), of the cheapest path from row to column, inf where there is none. Demanding None is free
    whatever is supplied; when None is supplied, nothing else can be demanded.
    """

    def __init__(self, arcs: Iterable[Arc], labels: Iterable[Label]) -> None:
        """`labels`: those on the ports, which need not be on any arc."""
        self.index: dict[Label | None, int] = {}
        self._arcs: dict[tuple[int, int], Arc] = {}  # the cheapest arc from label to label
        for arc in arcs:
            key = (self._add(arc.source), self._add(arc.target))
            if key not in self._arcs or arc.cost < self._arcs[key].cost:
                self._arcs[key] = arc
        for label in labels:
            self._add(label)
        size = len(self.index)
        self.index[None] = size

        step = np.full((size, size), math.inf)
        if self._arcs:
            sources, targets = np.array(list(self._arcs)).T
            step[sources, targets] = [arc.cost for arc in self._arcs.values()]
        np.fill_diagonal(step, math.inf)
        distance, self._previous = _relax(step)

        self.cost = np.full((size + 1, size + 1), math.inf)
        self.cost[:size, :size] = distance
        self.cost[:, size] = 0.0

    def _add(self, label: Label) -> int:
        return self.index.setdefault(label, len(self.index))

    def path(self, source: Label | None, target: Label | None) -> tuple[Arc, ...]:
        """The arcs from `source` to `target` in order. The cost between the two must be finite."""
        if source == target or target is None:
            return ()
        first, here = self.index[source], self.index[target]
        arcs: list[Arc] = []
        while here != first:
            before = int(self._previous[first, here])
            arcs.append(self._arcs[before, here])
            here = before
        return tuple(reversed(arcs))

    def useful_arcs(self, sources: np.ndarray, targets: np.ndarray) -> list[Arc]:
        """The arcs on the chosen cheapest paths from each of `sources` to the one of `targets` at the same position.

        Both hold indices; a pair must have a path. All other arcs can be left out without making any pair more expensive.
        """
        size = len(self.index) - 1
        moving = (sources != targets) & (targets != size)
        origin, here = sources[moving], targets[moving]
        used = np.zeros((size, size), dtype=bool)
        while here.size:
            before = self._previous[origin, here]
            used[before, here] = True
            origin, here = origin[before != origin], before[before != origin]
        return [self._arcs[int(a), int(b)] for a, b in np.argwhere(used)]


def _relax(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bellman-Ford from every label at once: (distance, last label but one), both (labels, labels).

    One more arc is allowed in each round and only strict improvements count, so ties go to fewer arcs and the
    predecessors form trees even where arcs cost nothing.
    """
    size = len(step)
    distance = step.copy()
    np.fill_diagonal(distance, 0.0)
    previous = np.repeat(np.arange(size)[:, None], size, axis=1)
    into = np.ascontiguousarray(step.T)
    rows = max(1, _BLOCK // max(1, size * size))
    for start in range(0, size, rows):
        block = slice(start, start + rows)
        while True:
            via = distance[block, None, :] + into[None]  # (source, target, last label but one)
            before = via.argmin(axis=2)
            reached = np.take_along_axis(via, before[:, :, None], axis=2)[:, :, 0]
            better = reached < distance[block]
            if not better.any():
                break
            distance[block] = np.where(better, reached, distance[block])
            previous[block] = np.where(better, before, previous[block])
    return distance, previous
