"""Rule of a mesh axis whose ranks train replicas apart: rows of the batch are split, parameters and all else are whole.

Unlike on other axes, no operation that depends on parameters may run on all rows, since each rank has other parameters.
"""
from __future__ import annotations

from collections.abc import Callable

from passes.graph.layouts import legal
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.axis import Axis
from passes.op_rules.base import REPLICATE, Strategy


def replica_axis_rule(axis: Axis, graph: PlacementGraph) -> Callable[[Operation, Strategy], bool]:
    """The strategies of an operation that the axis allows. Operations that cannot be split keep their whole strategy, which
    `check_replicas` refuses."""
    trained = of_parameters(graph)

    def fits(op: Operation, strategy: Strategy) -> bool:
        placed = [*zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)]
        if any(isinstance(p, tuple) and (p not in graph.values[v].batch or not legal(graph.values[v], (p,), (axis,)))
               for v, p in placed):
            return False
        # A sum over ranks has addends of each, or none (zeros); what every rank has alike is not one.
        return not strategy.inputs or any(p != REPLICATE for p in strategy.inputs) or all(
            p == REPLICATE or isinstance(p, tuple) for p in strategy.outputs)

    def splits(op: Operation, strategy: Strategy) -> bool:
        return fits(op, strategy) and any(isinstance(p, tuple) for p in strategy.inputs + strategy.outputs)

    forced = {op.index for op in graph.operations if op.index in trained and has_rows(op, graph)
              and any(splits(op, strategy) for strategy in op.strategies)}

    def allowed(op: Operation, strategy: Strategy) -> bool:
        return splits(op, strategy) if op.index in forced else fits(op, strategy)

    return allowed


def has_rows(op: Operation, graph: PlacementGraph) -> bool:
    """True if the operation reads or makes rows of the batch."""
    return any(graph.values[v].batch for v in (*op.inputs, *op.outputs))


def of_parameters(graph: PlacementGraph) -> set[int]:
    """Operations that depend on parameters; what the script gives backward as a gradient of rows does, too."""
    values, found = {v.index for v in graph.values if v.kind in ("parameter", "tangent")}, set[int]()
    for op in graph.operations:
        if not values.isdisjoint(op.inputs):
            values.update(op.outputs)
            found.add(op.index)
    return found
