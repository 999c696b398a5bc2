"""What a plan says is kept for backward, by the operations that it lists.

A rank runs the rewritten graph, whose nodes the plan's `kept` names. Most of them are operations that the plan lists. Others
are not: collectives, results of calls that have several, and what is one call there and two here, as a product with a bias.
Those are told by the block that they are made in and by their bytes.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.schema import GraphPlan


class CheckpointingView:
    """Look-ups in the plan of one graph of which a byte budget decided what is kept."""

    def __init__(self, graph: GraphPlan, kept: CheckpointingPlan):
        self.graph, self.kept = graph, kept

    @cached_property
    def again_us(self) -> dict[str, float]:
        """What running it once more takes, of operations for which that is done. The time of calls that are not listed is that
        of the first operation of their block that may be meant."""
        found = {name: call.predicted_us for name, call in self.kept.again.items() if name in self.graph.operations}
        rest: dict[str, float] = defaultdict(float)
        for name, call in self.kept.again.items():
            if name not in self.graph.operations:
                rest[call.block] += call.predicted_us
        for block, us in rest.items():
            dropped = (name for name, operation in self.graph.operations.items() if operation.block == block or not block
                       if not operation.backward and operation.predicted_us and not any(self.saved[name]))
            again = (name for name, call in self.kept.again.items() if name in found and call.block == block)
            name = next(again, next(dropped, None))
            if name is not None:
                found[name] = found.get(name, 0.0) + us
        return found

    @cached_property
    def saved(self) -> dict[str, tuple[bool, ...]]:
        """Of each result of an operation, whether it is in the device's memory from forward to backward."""
        left = Counter((value.block, value.bytes) for name, value in self.kept.saved.items()
                       if name not in self.graph.operations)
        found = {}
        for likely in (True, False):  # what torch's partitioner would save first: of two that look alike, it is that
            for name, operation in self.graph.operations.items():
                results = found.setdefault(name, [name in self._by_name] * len(operation.result_bytes))
                for k, nbytes in enumerate(operation.result_bytes):
                    may_be = operation.saved[k] if likely else len(results) > 1 and not operation.backward
                    if may_be and not results[k] and name not in self._equal:
                        results[k] = _take(left, operation.block, nbytes)
        return {name: tuple(results) for name, results in found.items()}

    @cached_property
    def _by_name(self) -> set[str]:
        """Operations with one result that is saved. What backward computes as forward does is computed once, in forward, and
        it is backward's that is read there."""
        names = set()
        for name, operation in self.graph.operations.items():
            if len(operation.result_bytes) == 1:
                twin = self._equal.get(name) if operation.backward and operation.saved[0] else None
                if name in self.kept.saved or twin in self.kept.saved:
                    names.add(name)
        return names

    @cached_property
    def _equal(self) -> dict[str, str]:
        """Operation -> the first one that does the same to the same, where that is another."""
        first: dict[tuple, str] = {}
        same: dict[str, str] = {}
        for name, operation in self.graph.operations.items():
            sources = tuple(same.get(source, source) for source in operation.sources)
            key = operation.op, sources, operation.inputs, operation.outputs, operation.result_bytes
            if first.setdefault(key, name) != name:
                same[name] = first[key]
        return same


def _take(left: Counter[tuple[str, int]], block: str, nbytes: int) -> bool:
    """One of those that are left; what is in no block may be called after its module here."""
    for key in ((block, nbytes), ("", nbytes)):
        if left[key] > 0:
            left[key] -= 1
            return True
    return False
