"""Factors of every dim of every value, so that a view maps factor to factor.

A dim of size 4096 that one view takes apart into 32 x 128 has the factors (32, 128) everywhere: in the matrix product
before, in its gradient, in the parameter. They are found as *cuts*: the products of inner factors (here 128). A rule
says how the cuts of its operands and results correspond; cuts are passed on until nothing changes. The cuts of a dim
form a chain under divisibility; a cut that does not fit the chain is left out, and the rule at which that happened
sees factors that do not correspond, so it splits only the outermost one.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from passes.op_rules.base import Factors, Rule

Place = tuple[int, int]
"""(value, dim)"""


class RuledCall(NamedTuple):
    """Rule of a call with the values of its operands and results."""

    rule: Rule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _fits(cuts: set[int], cut: int, size: int) -> bool:
    return 1 < cut < size and size % cut == 0 and all(c % cut == 0 or cut % c == 0 for c in cuts)


class _DimCuts:
    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.shapes = shapes
        self.cuts: dict[Place, set[int]] = {}
        self.values: set[int] = set()
        """Values with a cut."""

    def add(self, place: Place, cut: int) -> bool:
        own = self.cuts.setdefault(place, set())
        if cut in own or not _fits(own, cut, self.shapes[place[0]][place[1]]):
            return False
        own.add(cut)
        self.values.add(place[0])
        return True

    def factors(self, value: int) -> Factors:
        rows = []
        for dim, size in enumerate(self.shapes[value]):
            bounds = [size, *sorted(self.cuts.get((value, dim), ()), reverse=True), 1]
            rows.append(tuple(a // b for a, b in zip(bounds, bounds[1:])) if size > 1 else ())
        return tuple(rows)


def places_of(call: RuledCall) -> list[tuple[object, Place, int]]:
    """(letter, place, inner stride of the letter in its dim) for every letter of a call."""
    found = []
    for tensors, values in ((call.rule.inputs, call.inputs), (call.rule.outputs, call.outputs)):
        for letters, value in zip(tensors, values):
            for dim, row in enumerate(letters):
                stride = 1
                for letter in reversed(row):
                    found.append((letter, (value, dim), stride))
                    stride *= call.rule.sizes[letter]
    return found


def _relax(call: RuledCall, places: list[tuple[object, Place, int]], state: _DimCuts) -> set[int]:
    """Make the cuts of every letter equal in all its places; returns the values that changed."""
    letters: dict[object, set[int]] = {}
    for letter, place, stride in places:
        size = call.rule.sizes[letter]
        own = letters.setdefault(letter, set())
        for cut in state.cuts.get(place, ()):
            if cut % stride == 0 and 1 < cut // stride < size:
                own.add(cut // stride)
    changed = set()
    for letter, place, stride in places:
        wanted = [stride] if stride > 1 else []
        wanted += [cut * stride for cut in sorted(letters[letter])]
        for cut in wanted:
            if state.add(place, cut):
                changed.add(place[0])
    return changed


def factorize(shapes: Sequence[tuple[int, ...]], calls: Sequence[RuledCall],
              cuts: Iterable[tuple[Place, int]] = ()) -> list[Factors]:
    """Factors of every value, by index into `shapes`. cuts: given in addition to those of views.

    Terminates: cuts are only added, and a dim of size n has at most log2(n) of them.
    """
    state = _DimCuts(shapes)
    for place, cut in cuts:
        state.add(place, cut)
    places: dict[int, list[tuple[object, Place, int]]] = {}
    nested: dict[int, bool] = {}  # by rule: views, which make cuts; all other calls pass them on
    readers: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        for value in {*call.inputs, *call.outputs}:
            readers.setdefault(value, []).append(index)
    queue, queued = deque(range(len(calls))), [True] * len(calls)
    while queue:
        index = queue.popleft()
        queued[index] = False
        call = calls[index]
        if id(call.rule) not in nested:
            nested[id(call.rule)] = any(len(row) > 1 for letters in (*call.rule.inputs, *call.rule.outputs) for row in letters)
        if not nested[id(call.rule)] and state.values.isdisjoint(call.inputs) and state.values.isdisjoint(call.outputs):
            continue
        if index not in places:
            places[index] = places_of(call)
        for value in _relax(call, places[index], state):
            for other in readers[value]:
                if not queued[other]:
                    queued[other] = True
                    queue.append(other)
    return [state.factors(value) for value in range(len(shapes))]
