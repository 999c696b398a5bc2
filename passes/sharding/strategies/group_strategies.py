"""Joint strategies of a group on one mesh axis: one strategy per operation, consistent on every value inside.

Found by a dynamic program over the operations in order. A state is the placement of every live value; states
that agree on those are merged, keeping the cheaper one. Three exceptions to the rule that a value has one placement:

- a value from outside, or from an operation that cannot be split (a random mask), may be read whole by one
  operation and split by another, or split in several ways: it is replicated then, and a slice is free;
- a small partial result may be reduced where it is computed (the statistics of a norm over a split dim), at its price;
- a dead value is forgotten.

The replicated strategy is always offered, at any cost: a cheaper strategy on one axis may split, with another axis too, a
factor that both together do not divide.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passes.graph.layouts import legal
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.hardware.axis import Axis
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, REPLICATE, Placement, Strategy
from passes.sharding.grouping.group_symmetry import GroupNumbers
from passes.sharding.grouping.op_groups import SMALL_FRACTION, OpGroup
from passes.solver.work_limit import WorkLimit

MAX_STATES, FEW_STATES = 400, 16
REDUCIBLE = (PARTIAL, PARTIAL_MAX)


@dataclass(frozen=True)
class OperationStrategy:
    """Strategy of one operation of the group, and which of its results are reduced at once."""

    strategy: Strategy
    reduced: tuple[bool, ...]

    def placed(self) -> tuple[Placement, ...]:
        """Placements of the results after that reduction."""
        return tuple(REPLICATE if r else p for p, r in zip(self.strategy.outputs, self.reduced))


Ends = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of a group's inputs and outputs."""
_Done = tuple["_Done", OperationStrategy] | None
"""Strategies of the operations so far, the last one first: a shared linked list."""
_Step = tuple[dict[int, str], str, float, OperationStrategy]
"""Placements that change, by index among the live values; placements that are added; the price; the strategies."""


@dataclass(frozen=True)
class GroupStrategy:
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    operations: tuple[OperationStrategy, ...]


class GroupStrategyCache:
    """Joint strategies of equal groups on axes of one size.

    They are searched again where a priced reduction costs something else on an axis. numbers: of equal groups.
    """

    def __init__(self) -> None:
        self.numbers = GroupNumbers()
        self._found: dict[Hashable, list[tuple[dict[int, float], list[GroupStrategy]]]] = {}

    def find(self, key: Hashable, reduce_cost: Callable[[int], float],
             search: Callable[[Callable[[int], float]], list[GroupStrategy]],
             allowance: WorkLimit) -> list[GroupStrategy]:
        """search: finds the strategies for a price of reductions. Results found after the time limit are not cached."""
        known = self._found.setdefault(key, [])
        for asked, joints in known:
            if all(reduce_cost(nbytes) == cost for nbytes, cost in asked.items()):
                return joints
        asked = {}

        def cost_of(nbytes: int) -> float:
            if nbytes not in asked:
                asked[nbytes] = reduce_cost(nbytes)
            return asked[nbytes]

        joints = search(cost_of)
        if not allowance.is_over:
            known.append((asked, joints))
        return joints


def divides(value: Value, placement: Placement, axis: Axis) -> bool:
    return not isinstance(placement, tuple) or legal(value, (placement,), (axis,))


def _options(op: Operation, graph: PlacementGraph, axis: Axis, small: int, allowed: Callable) -> list[OperationStrategy]:
    found = []
    for s in op.strategies:
        if not all(divides(graph.values[v], p, axis) for v, p in zip(op.inputs, s.inputs)):
            continue
        if not all(divides(graph.values[v], p, axis) for v, p in zip(op.outputs, s.outputs)):
            continue
        if not allowed(op, s):
            continue
        found.append(OperationStrategy(s, (False,) * len(op.outputs)))
        reducible = [p in REDUCIBLE and graph.values[v].bytes <= small for v, p in zip(op.outputs, s.outputs)]
        if any(reducible):
            found.append(OperationStrategy(s, tuple(reducible)))
    return found


def strategies_on_axis(
    group: OpGroup, graph: PlacementGraph, size: int,
    reduce_cost: Callable[[int], float], cost_per_byte: float, cost_per_flop: float,
    allowed: Callable[[Operation, Strategy], bool] = lambda op, s: True,
    allowance: WorkLimit | None = None,
    ends: Ends | None = None, rows: tuple[int, ...] = (),
) -> list[GroupStrategy]:
    """All joint strategies on an axis of `size`, the cheapest for each placement of the group's boundary.

    `reduce_cost(bytes)` prices a reduction inside; `allowed(op, strategy)` restricts (a pinned axis). `allowance`: once it is
    spent, few are found besides the replicated one. `ends`: placements required at the boundary, in full. `rows`: of the batch
    by coordinate, where they are unequal.
    """
    allowance, axis = allowance or WorkLimit(math.inf), Axis("", size, rows=rows)
    operations = [graph.operations[i] for i in group.operations]
    whole = _whole(group, operations, allowed)
    most = FEW_STATES if allowance.is_over and whole is not None and ends is None else MAX_STATES
    wanted = {} if ends is None else {**dict(zip(group.outputs, ends[1])), **dict(zip(group.inputs, ends[0]))}
    largest = max((graph.values[v].bytes for op in operations for v in (*op.inputs, *op.outputs)), default=0)
    last_use = {v: k for k, op in enumerate(operations) for v in op.inputs}
    outside, boundary = {*group.inputs}, {*group.inputs, *group.outputs}
    unsplittable = {v for op in operations if not any(s.splits for s in op.strategies) for v in op.outputs}
    live: list[int] = []
    letters = _Letters()
    # state: placement of every live value, by letter -> (cost, strategies of the operations so far, the latest first)
    states: dict[str, tuple[float, _Done]] = {"": (0.0, None)}
    for k, op in enumerate(operations):
        options = [(taken, _price(op, taken, graph, size, reduce_cost, cost_per_byte, cost_per_flop))
                   for taken in _options(op, graph, axis, largest // SMALL_FRACTION, allowed)]
        read = [live.index(v) if v in live else None for v in op.inputs]
        known = [*live, *dict.fromkeys(v for v, slot in zip(op.inputs, read) if slot is None), *op.outputs]
        kept = [slot for slot, v in enumerate(known) if v in boundary or last_use.get(v, -1) > k]
        names, pick = [known[slot] for slot in kept], _picker(kept)
        steps: dict[tuple[str | None, ...], list[_Step]] = {}
        following: dict[str, tuple[float, _Done]] = {}
        allowance.spend("joint step", len(states) * len(options))
        for state, (cost, done) in states.items():
            have = tuple(None if slot is None else state[slot] for slot in read)
            if have not in steps:
                steps[have] = [*_steps(op, have, options, known[:len(live)], outside, unsplittable, letters)]
            for changes, added, price, taken in steps[have]:
                env = state + added
                for slot, letter in changes.items():
                    env = env[:slot] + letter + env[slot + 1:]
                key, price = pick(env), cost + price
                if wanted and _misses(zip(names, letters.read(key)), wanted, outside):
                    continue
                if key not in following or following[key][0] > price:
                    following[key] = price, (done, taken)
        if len(following) > most:
            following = dict(sorted(following.items(), key=lambda kv: kv[1][0])[:most])
        states, live = following, names
    final = sorted(states.items(), key=lambda kv: kv[1][0])
    inputs, outputs = ([tuple(letters.read(state[slot] for slot in slots)) for state, _ in final]
                       for slots in ([live.index(v) for v in values] for values in (group.inputs, group.outputs)))
    joints = [GroupStrategy(inputs[k], outputs[k], _in_order(final[k][1][1])) for k in undominated_ends(inputs, outputs)]
    return joints if whole is None or whole in joints else [*joints, whole]


def _whole(group: OpGroup, operations: Sequence[Operation], allowed: Callable) -> GroupStrategy | None:
    """The replicated joint strategy, if it is allowed."""
    taken = []
    for op in operations:
        whole = (s for s in op.strategies if {*s.inputs, *s.outputs} <= {REPLICATE} and allowed(op, s))
        strategy = next(whole, None)
        if strategy is None:
            return None
        taken.append(OperationStrategy(strategy, (False,) * len(op.outputs)))
    return GroupStrategy((REPLICATE,) * len(group.inputs), (REPLICATE,) * len(group.outputs), tuple(taken))


class _Letters:
    """A letter for each placement: strings are joined, cut and compared much faster than tuples, and groups have hundreds of
    live values."""

    def __init__(self) -> None:
        self._of: dict[Placement, str] = {}
        self._placements: list[Placement] = []

    def write(self, placements: Iterable[Placement]) -> str:
        return "".join([self._of.get(p) or self._add(p) for p in placements])

    def read(self, letters: Iterable[str]) -> list[Placement]:
        return [self._placements[ord(letter)] for letter in letters]

    def _add(self, placement: Placement) -> str:
        letter = self._of[placement] = chr(len(self._placements))
        self._placements.append(placement)
        return letter


def _picker(slots: Sequence[int]) -> Callable[[str], str]:
    """Function that returns the letters of a string at some places, which ascend."""
    starts = [k for k, slot in enumerate(slots) if k == 0 or slots[k - 1] != slot - 1]
    parts = [slice(slots[start], slots[stop - 1] + 1) for start, stop in zip(starts, [*starts[1:], len(slots)])]
    if len(parts) == 1:
        return operator.itemgetter(parts[0])
    return lambda env: "".join([env[part] for part in parts])


def undominated_ends(inputs: Sequence[Sequence[Placement]], outputs: Sequence[Sequence[Placement]]) -> list[int]:
    """Indices of the strategies, the cheapest first, that none before them can replace anywhere: a slice is free, so a reader
    of a shard may be given the whole value, and a whole result serves readers of a shard."""
    numbers: dict[Placement, int] = {REPLICATE: 0, PARTIAL: 1, PARTIAL_MAX: 2}  # shards have those from 3 on
    replaces = np.tri(len(inputs), k=-1, dtype=bool).T  # (a, b): whether a is before b, and then whether it replaces b
    for sides, reads in ((inputs, True), (outputs, False)):
        for placed in zip(*sides):
            number = np.array([numbers.setdefault(p, len(numbers)) for p in placed])
            first, second = (number > 2, number == 0) if reads else (number == 0, number > 2)
            replaces &= (number[:, None] == number) | (first[:, None] & second)
    kept = np.zeros(len(inputs), dtype=bool)
    for k in range(len(inputs)):
        kept[k] = not (replaces[:, k] & kept).any()
    return np.flatnonzero(kept).tolist()


def _misses(placed: Iterable[tuple[int, Placement]], wanted: Mapping[int, Placement], outside: Container[int]) -> bool:
    """True if a value does not have its required placement. A value from outside may still become whole."""
    return any(v in wanted and p != wanted[v] and not (v in outside and isinstance(p, tuple) and wanted[v] == REPLICATE)
               for v, p in placed)


def _in_order(done: _Done) -> tuple[OperationStrategy, ...]:
    found = []
    while done is not None:
        done, taken = done
        found.append(taken)
    return tuple(reversed(found))


def _steps(op: Operation, have: Sequence[str | None], options: Sequence[tuple[OperationStrategy, float]],
           live: Sequence[int], outside: set[int], unsplittable: set[int], letters: _Letters) -> Iterator[_Step]:
    """Strategies of the operation given the placements of its operands (None: not decided yet)."""
    there = {v: letters.read(p)[0] for v, p in zip(op.inputs, have) if p is not None}
    missing = [*dict.fromkeys(v for v in op.inputs if v not in there)]
    for taken, price in options:
        new = _read(op, taken.strategy.inputs, there, outside, unsplittable)
        if new is not None:
            changes = {live.index(v): letters.write([p]) for v, p in new.items() if v in there}
            yield changes, letters.write([*(new[v] for v in missing), *taken.placed()]), price, taken


def _read(op: Operation, wanted: Sequence[Placement], known: dict[int, Placement], outside: set[int],
          unsplittable: set[int]) -> dict[int, Placement] | None:
    """Placements that the reads add or change, or None if a value has another placement. A value from `outside` becomes whole
    as soon as two readers want different shards of it, or one of them the whole."""
    new: dict[int, Placement] = {}
    for v, p in zip(op.inputs, wanted):
        have = new.get(v, known.get(v))
        if have is None:
            new[v] = p
        elif have == p or (have == REPLICATE and isinstance(p, tuple) and v in outside | unsplittable):
            continue
        elif v in outside and isinstance(have, tuple) and (p == REPLICATE or isinstance(p, tuple)):
            new[v] = REPLICATE
        else:
            return None
    return new


def _price(op: Operation, taken: OperationStrategy, graph: PlacementGraph, size: int, reduce_cost, cost_per_byte,
           cost_per_flop) -> float:
    share = 1 / size if taken.strategy.splits else 1.0
    total = op.flops * share * cost_per_flop
    for v, p, reduced in zip(op.outputs, taken.strategy.outputs, taken.reduced):
        local = graph.values[v].bytes / (size if isinstance(p, tuple) else 1)
        total += local * cost_per_byte
        if reduced:
            total += reduce_cost(int(local))
    return total
