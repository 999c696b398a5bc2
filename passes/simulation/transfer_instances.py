"""Which legs of redistributions run at which instance of a call, so that each runs as often as the step graph says."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from passes.simulation.layer_unrolling import CallInstance
from passes.simulation.step_graph import StepGraph, Transfer


class TransferInstances:
    """Those into a reader, those out of a call that the graph returns, and those that nothing in the graph waits for."""

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
        """Of r equal legs and n runs of their reader: each run has r / n; where there are fewer legs, those runs
        have one that read what moves: the last ones, if it comes from the layer before, else the first."""
        whole, rest = divmod(leg.multiplicity, each.runs)
        made_before = self.order.get(leg.value, -1) <= self.order[each.call.name]
        here = each.position < rest if made_before else each.position >= each.runs - rest
        return whole + here


def _chained(legs: list[Transfer]) -> list[Transfer]:
    """Legs of one reader such that one which starts where another of the same value ends comes after it."""
    found: list[Transfer] = []
    rest = list(legs)
    while rest:
        free = next((m for m in rest if not any(
            o is not m and o.value == m.value and o.target == m.source for o in rest)), rest[0])
        rest.remove(free)
        found.append(free)
    return found
