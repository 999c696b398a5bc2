"""Operations that mix rows of the batch: forward operations that read both rows and a result over all rows.

BatchNorm's statistics are the usual case: sums over the rows, which then normalize each of them. A loss that averages
over rows does not count, since no row reads it. Where rows mix, computing parts of a batch separately, each with its own
statistics, differs from computing the whole batch.
"""
from __future__ import annotations

from passes.graph.placement_graph import PlacementGraph
from passes.graph.step_phase import BACKWARD


def mixing_operations(graph: PlacementGraph) -> list[str]:
    """Names of the forward operations at which rows mix, in graph order; `Value.batch` must be set.

    An operation counts if its result has rows and one of its operands depends on rows but has none. That errs on
    the side of caution: rows that cannot be followed (through a sort, or an operator without a rule) count as mixed.
    """
    from_rows = {value.index for value in graph.values if value.kind == "batch" and value.batch}
    found = []
    for op in graph.operations:
        if op.phase == BACKWARD:
            continue
        read = from_rows.intersection(op.inputs)
        if read:
            from_rows.update(op.outputs)
        if any(not graph.values[v].batch for v in read) and any(graph.values[v].batch for v in op.outputs):
            found.append(op.name)
    return found
