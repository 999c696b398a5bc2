"""Group operations so that only values between groups need a decision.

A heavy operation (matrix product, attention, look-up) takes along the views that lead to it and the linear operations
that follow it; pointwise operations and reductions join each other within a block. Sums of heavy results stay apart,
so that partial sums are added before one reduction; a residual sum with several users starts a group of its own.
Groups never reach over the bounds of a repeated block or from forward into backward: folding counts by those.
"""
from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import Phase
from passes.op_rules.base import PARTIAL

SMALL_FRACTION = 8
"""A value is small beside another one that has this many times its bytes."""


@dataclass
class OpGroup:
    index: int
    operations: tuple[int, ...]
    inputs: tuple[int, ...]
    """Values read from outside, in order of first use."""
    outputs: tuple[int, ...]
    """Values that other groups read or the graph returns, in order."""
    phase: Phase
    block: str

    def heavy(self, graph: PlacementGraph) -> list[Operation]:
        return [graph.operations[i] for i in self.operations if graph.operations[i].heavy]


class _OpGrouping:
    def __init__(self, graph: PlacementGraph):
        self.graph = graph
        self.parent = list(range(len(graph.operations)))
        self.anchor: list[int | None] = [None] * len(graph.operations)
        """The heavy operation that a light one is attached to."""
        self.sum_of_heavy = [False] * len(graph.operations)

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        a, b = self.find(i), self.find(j)
        self.parent[max(a, b)] = min(a, b)

    def leads_to_heavy(self, op: Operation) -> int | None:
        """The only heavy operation that a view leads to, if there is one."""
        while op.kind == "view" and len(op.outputs) == 1:
            users = self.graph.values[op.outputs[0]].users
            if len(users) != 1:
                return None
            op = self.graph.operations[users[0]]
            if op.heavy:
                return op.index
        return None

    def passes_partial(self, op: Operation, v: int, anchor: int) -> bool:
        """True if partial sums of the anchor, if it can produce any, pass through `op`. They do not where a bias is added;
        joined to such an op, the anchor could never be split along its contracted dim."""
        if not any(PARTIAL in s.outputs for s in self.graph.operations[anchor].strategies):
            return True
        return any(
            all((p == PARTIAL) == (operand == v) for operand, p in zip(op.inputs, s.inputs)) for s in op.strategies
        )

    def run(self) -> None:
        views = {}
        returned = {v for v, _ in self.graph.outputs}
        for op in self.graph.operations:
            heavy = self.leads_to_heavy(op) if op.kind == "view" and not set(op.outputs) & returned else None
            if heavy is not None:
                views[op.index] = heavy
                self.join(op.index, heavy)
        for op in self.graph.operations:
            if op.heavy:
                self.anchor[op.index] = op.index
            elif op.index not in views and op.ruled and op.outputs:
                self.place(op, views)

    def place(self, op: Operation, views: dict[int, int]) -> None:
        values, operations = self.graph.values, self.graph.operations
        operands = [values[v] for v in dict.fromkeys(op.inputs)]
        largest = max((v.bytes for v in operands), default=0)
        big = [v for v in operands if v.bytes * SMALL_FRACTION > largest]

        def near(v: Value) -> bool:
            if v.producer is None or v.producer in views:
                return False
            p = operations[v.producer]
            return p.phase == op.phase and p.block == op.block and p.ruled

        sources = [v for v in big if near(v)] or [v for v in operands if near(v)]
        if not sources:
            return
        makers = [v.producer for v in sources if v.producer is not None]
        anchors = {self.anchor[m] for m in makers}
        (anchor,) = anchors if len(anchors) == 1 else (None,)
        if anchor is not None and op.linear and len(big) == 1 and self.passes_partial(op, big[0].index, anchor):
            widest = max(values[v].bytes for v in operations[anchor].outputs)
            if sum(values[v].bytes for v in op.outputs) <= widest:
                self.anchor[op.index] = anchor
                self.join(op.index, anchor)
                return
        summing = "add.Tensor" in op.target and len(big) >= 2
        if summing and len(sources) == len(big) and all(
            self.anchor[m] is not None or self.sum_of_heavy[m] for m in makers
        ):
            self.sum_of_heavy[op.index] = True
            for v, maker in zip(sources, makers, strict=True):
                if self.sum_of_heavy[maker] and len(v.users) == 1:
                    self.join(op.index, maker)
            return
        same_phase_users = [
            u for v in op.outputs for u in values[v].users if operations[u].phase == op.phase
        ]
        if summing and len(same_phase_users) > 1:
            return
        for maker in makers:
            if self.anchor[maker] is None and not self.sum_of_heavy[maker]:
                self.join(op.index, maker)


def groups_of(graph: PlacementGraph, merge: bool = True, apart: Container[int] = ()) -> list[OpGroup]:
    """Groups in order of their first operation; every operation is in exactly one; those in `apart` are singletons."""
    grouping = _OpGrouping(graph)
    if merge:
        grouping.run()
    members: dict[int, list[int]] = {}
    for op in graph.operations:
        root = -1 - op.index if op.index in apart else grouping.find(op.index)
        members.setdefault(root, []).append(op.index)
    owner = {i: root for root, ops in members.items() for i in ops}
    returned = {v for v, _ in graph.outputs}
    found = []
    for root, ops in members.items():
        inputs: dict[int, None] = {}
        outputs = []
        for i in ops:
            op = graph.operations[i]
            for v in op.inputs:
                producer = graph.values[v].producer
                if producer is None or owner[producer] != root:
                    inputs[v] = None
            for v in op.outputs:
                if v in returned or any(owner[u] != root for u in graph.values[v].users):
                    outputs.append(v)
        lead = next((graph.operations[i] for i in ops if graph.operations[i].heavy), graph.operations[ops[0]])
        found.append(OpGroup(len(found), tuple(ops), tuple(inputs), tuple(outputs), lead.phase, lead.block))
    return found
