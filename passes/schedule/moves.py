"""Which moves run at which instance of a call, so that each runs as often as the step graph says."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from passes.schedule.step_graph import Move, StepGraph
from passes.schedule.unroll import Instance


class Moves:
    """Those into a reader, those out of a call that the graph returns, and those that nothing in the graph waits for."""

    def __init__(self, graph: StepGraph):
        self.order = {call.name: k for k, call in enumerate(graph.calls)}
        self._into: dict[str, list[Move]] = defaultdict(list)
        self._out: dict[str, list[Move]] = defaultdict(list)
        self.loose: list[Move] = []
        for move in graph.moves:
            if move.reader in self.order:
                self._into[move.reader].append(move)
            elif move.value in self.order:
                self._out[move.value].append(move)
            else:
                self.loose.append(move)
        for moves in self._into.values():
            moves[:] = _chained(moves)

    def into(self, each: Instance) -> list[tuple[Move, int]]:
        return list(self._here(self._into.get(each.call.name, ()), each))

    def out_of(self, each: Instance) -> list[tuple[Move, int]]:
        return list(self._here(self._out.get(each.call.name, ()), each))

    def _here(self, moves: Iterable[Move], each: Instance) -> Iterable[tuple[Move, int]]:
        return ((move, n) for move in moves if (n := self._repeats(move, each)))

    def _repeats(self, move: Move, each: Instance) -> int:
        """Of r equal moves and n runs of their reader: each run has r / n; where there are fewer moves, those runs
        have one that read what moves: the last ones, if it comes from the layer before, else the first."""
        whole, rest = divmod(move.multiplicity, each.runs)
        made_before = self.order.get(move.value, -1) <= self.order[each.call.name]
        here = each.position < rest if made_before else each.position >= each.runs - rest
        return whole + here


def _chained(moves: list[Move]) -> list[Move]:
    """Moves of one reader such that one which starts where another of the same value ends comes after it."""
    found: list[Move] = []
    rest = list(moves)
    while rest:
        free = next((m for m in rest if not any(
            o is not m and o.value == m.value and o.target == m.source for o in rest)), rest[0])
        rest.remove(free)
        found.append(free)
    return found
