"""Distribute transfers over the instances of a call, so that each runs as often as the step graph says."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from passes.simulation.layer_unrolling import CallInstance
from passes.simulation.step_graph import StepGraph, Transfer


class TransferInstances:
    """Transfers into a reader, transfers of a call's graph outputs, and transfers without a waiting call in the graph."""

    def __init__(self, graph: StepGraph):
        self.order = {call.name: k for k, call in enumerate(graph.calls)}
        self._into: dict[str, list[Transfer]] = defaultdict(list)
        self._out: dict[str, list[Transfer]] = defaultdict(list)
        self.loose: list[Transfer] = []
        for leg in graph.legs:
            if leg.reader in self.order:
                self._into[leg.reader].append(leg)
            elif leg.value in self.order:
                self._out[leg.value].append(leg)
            else:
                self.loose.append(leg)
        for legs in self._into.values():
            legs[:] = _chained(legs)

    def into(self, each: CallInstance) -> list[tuple[Transfer, int]]:
        return list(self._here(self._into.get(each.call.name, ()), each))

    def out_of(self, each: CallInstance) -> list[tuple[Transfer, int]]:
        return list(self._here(self._out.get(each.call.name, ()), each))

    def _here(self, legs: Iterable[Transfer], each: CallInstance) -> Iterable[tuple[Transfer, int]]:
        return ((leg, n) for leg in legs if (n := self._repeats(leg, each)))

    def _repeats(self, leg: Transfer, each: CallInstance) -> int:
        """With r equal transfers and n runs of their reader, each run has r / n; where there are fewer transfers than runs,
        those runs that read the transferred value have one: the last ones, if it comes from the previous layer, else the
        first."""
        whole, rest = divmod(leg.multiplicity, each.runs)
        made_before = self.order.get(leg.value, -1) <= self.order[each.call.name]
        here = each.position < rest if made_before else each.position >= each.runs - rest
        return whole + here


def _chained(legs: list[Transfer]) -> list[Transfer]:
    """Order the transfers of a reader so that one which starts at the end of another comes after it."""
    found: list[Transfer] = []
    rest = list(legs)
    while rest:
        free = next((m for m in rest if not any(
            o is not m and o.value == m.value and o.target == m.source for o in rest)), rest[0])
        rest.remove(free)
        found.append(free)
    return found
