"""Factors of values that are rows of the batch: a pinned `dp` axis splits these, a `tp` axis leaves them alone.

Union-find over the (value, dim, factor) triples that one strategy of a call splits together, from dim 0 of the inputs
that are data. A weight is never among them: in `x @ w` only `x` and the result carry the row letter.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence

from passes.graph.placement_graph import Operation, Value


class UnionFind:
    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, x: Hashable) -> Hashable:
        root = x
        while self.parent.setdefault(root, root) != root:
            root = self.parent[root]
        while self.parent[x] != root:
            self.parent[x], x = root, self.parent[x]
        return root

    def union(self, a: Hashable, b: Hashable) -> None:
        self.parent[self.find(b)] = self.find(a)


def batch_factors(operations: Sequence[Operation], values: Sequence[Value]) -> list[frozenset[tuple[int, int]]]:
    """`Value.batch` of every value."""
    return split_along(operations, values, [
        (v.index, 0, 0) for v in values if v.kind == "batch" and v.spec.shape and v.factors[0]])


def split_along(operations: Sequence[Operation], values: Sequence[Value], seeds: Sequence[tuple[int, int, int]],
                ) -> list[frozenset[tuple[int, int]]]:
    """The (dim, factor) pairs of every value that strategies split together with these (value, dim, factor)."""
    sets = UnionFind()
    for operation in operations:
        ports = (*operation.inputs, *operation.outputs)
        for strategy in operation.strategies:
            together = [
                (value, *placement)
                for value, placement in zip(ports, strategy.inputs + strategy.outputs)
                if isinstance(placement, tuple)
            ]
            for other in together[1:]:
                sets.union(together[0], other)
    roots = {sets.find(seed) for seed in seeds}
    members: dict[int, set[tuple[int, int]]] = {}
    for key in list(sets.parent):
        if sets.find(key) in roots:
            value, dim, factor = key  # type: ignore[misc]
            members.setdefault(value, set()).add((dim, factor))
    return [frozenset(members.get(value.index, ())) for value in values]
