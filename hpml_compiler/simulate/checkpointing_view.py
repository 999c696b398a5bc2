"""Map a plan's saved and recomputed values (activation checkpointing) to the operations that it lists.

A rank runs the rewritten graph, and the plan's `kept` names nodes of that graph. Most of them are operations that the plan
lists. Others are not: collectives, results of calls with several outputs, and calls that are one node there and two here,
such as a matmul with a bias. Those are matched by block and bytes.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.schema import GraphPlan
from passes.graph.placement_graph import block_class


class CheckpointingView:
    """Look-ups in the plan of one graph whose activation checkpointing was decided under a memory budget."""

    def __init__(self, graph: GraphPlan, kept: CheckpointingPlan):
        self.graph, self.kept = graph, kept

    @cached_property
    def again_us(self) -> dict[str, float]:
        """Recompute time in µs by recomputed operation. The time of calls that are not listed is added to the first operation
        of their block that may be recomputed."""
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
    def us_of_layers(self) -> dict[str, float]:
        """Time in µs of recomputing and offloading in each layer of a class of blocks, on average; "" outside of repeated
        blocks."""
        layers: dict[str, int] = defaultdict(int)
        for operation in self.graph.operations.values():
            layers[block_class(operation.block)] = max(layers[block_class(operation.block)], self.graph.runs(operation))
        found: dict[str, float] = defaultdict(float)
        for each in (*self.kept.again.values(), *self.kept.offloaded.values()):
            kind = block_class(each.block)
            repeated = kind != each.block and kind in layers
            found[kind if repeated else ""] += each.predicted_us * each.layers / (layers[kind] if repeated else 1)
        return dict(found)

    @cached_property
    def offload_us(self) -> dict[str, float]:
        """Time in µs of moving values out of the device's memory and back, by operation. That of values which are not listed is
        added to the last operation of their block in forward, or of forward if it lists none of that block."""
        forward = [name for name, operation in self.graph.operations.items() if not operation.backward]
        last = {self.graph.operations[name].block: name for name in forward}
        found: dict[str, float] = defaultdict(float)
        for name, value in self.kept.offloaded.items():
            own = name if name in self.graph.operations else last.get(value.block, forward[-1])
            found[own] += value.predicted_us * value.layers
        return dict(found)

    @cached_property
    def saved(self) -> dict[str, tuple[bool, ...]]:
        """For each operation, one flag per result: True if it is in the device's memory from forward to backward."""
        left = Counter((value.block, value.bytes) for name, value in self.kept.saved.items()
                       if name not in self.graph.operations)
        found = {}
        for likely in (True, False):  # of values of equal size, first those that torch's partitioner would save
            for name, operation in self.graph.operations.items():
                results = found.setdefault(name, [name in self._by_name] * len(operation.result_bytes))
                for k, nbytes in enumerate(operation.result_bytes):
                    may_be = operation.saved[k] if likely else len(results) > 1 and not operation.backward
                    if may_be and not results[k] and name not in self._equal:
                        results[k] = _take(left, operation.block, nbytes)
        return {name: tuple(results) for name, results in found.items()}

    @cached_property
    def _by_name(self) -> set[str]:
        """Operations whose single result is saved. If backward repeats an operation of forward, it is computed once, in
        forward, and the listed operation in backward counts as saved."""
        names = set()
        for name, operation in self.graph.operations.items():
            if len(operation.result_bytes) == 1:
                twin = self._equal.get(name) if operation.backward and operation.saved[0] else None
                if name in self.kept.saved or twin in self.kept.saved:
                    names.add(name)
        return names

    @cached_property
    def _equal(self) -> dict[str, str]:
        """Map duplicate operations to the first one of the same kind with the same inputs."""
        first: dict[tuple, str] = {}
        same: dict[str, str] = {}
        for name, operation in self.graph.operations.items():
            sources = tuple(same.get(source, source) for source in operation.sources)
            key = operation.op, sources, operation.inputs, operation.outputs, operation.result_bytes
            if first.setdefault(key, name) != name:
                same[name] = first[key]
        return same


def _take(left: Counter[tuple[str, int]], block: str, nbytes: int) -> bool:
    """Take one of the values that are left with these bytes; values without a block there may have a module as block here."""
    for key in ((block, nbytes), ("", nbytes)):
        if left[key] > 0:
            left[key] -= 1
            return True
    return False
