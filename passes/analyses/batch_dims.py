"""Factors of values that are rows of the batch: a pinned `dp` axis splits these, a `tp` axis leaves them alone.

They are reached from dim 0 of the inputs that are data through the strategies of calls, which split several places together. A
weight is never among them: in `x @ w` only `x` and the result carry the row letter.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from passes.graph.placement_graph import Operation, Value
from passes.op_rules.base import Placement, Strategy


def batch_factors(operations: Sequence[Operation], values: Sequence[Value]) -> list[frozenset[tuple[int, int]]]:
    """`Value.batch` of every value."""
    return split_along(operations, values, [
        (v.index, 0, 0) for v in values if v.kind == "batch" and v.spec.shape and v.factors[0]])


def split_along(operations: Sequence[Operation], values: Sequence[Value], seeds: Sequence[tuple[int, int, int]],
                ) -> list[frozenset[tuple[int, int]]]:
    """The (dim, factor) pairs of every value that strategies split together with these (value, dim, factor)."""
    links: dict[int, dict[tuple[int, Placement], set[tuple[int, Placement]]]] = {}  # by id: equal calls share their strategies
    calls: list[list[tuple[int, Sequence[int], Operation]]] = [[] for _ in values]
    for op in operations:
        if id(op.strategies) not in links:
            links[id(op.strategies)] = _links(op.strategies)
        ports = (*op.inputs, *op.outputs)
        for port, v in enumerate(ports):
            calls[v].append((port, ports, op))
    found: list[set[Placement]] = [set() for _ in values]
    left: list[tuple[int, Placement]] = [(v, (dim, factor)) for v, dim, factor in seeds]
    while left:
        v, placement = left.pop()
        if placement not in found[v]:
            found[v].add(placement)
            for port, ports, op in calls[v]:
                left += [(ports[other], p) for other, p in links[id(op.strategies)].get((port, placement), ())]
    return [frozenset(each) for each in found]  # pyright: ignore[reportReturnType]


def _links(strategies: Sequence[Strategy]) -> dict[tuple[int, Placement], set[tuple[int, Placement]]]:
    """(operand or result, its placement) -> the others that a strategy splits together with it."""
    found: dict[tuple[int, Placement], set[tuple[int, Placement]]] = defaultdict(set)
    for strategy in strategies:
        together = [each for each in enumerate(strategy.inputs + strategy.outputs) if isinstance(each[1], tuple)]
        for each in together:
            found[each].update(together)
    return found
