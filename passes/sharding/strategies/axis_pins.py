"""Constraints from the name of a pinned mesh axis: `dp` splits the batch, `tp` splits weights and anything but the batch,
other names constrain nothing. Operations on parameters alone, such as a cast, may be split on any axis: where parameters are
sharded, such operations run before the gather.

On a pinned axis, heavy operations that can be split that way must be: a pin is a constraint, not a hint. On `tp` they are split
by their weights where they have any (Shoeybi et al., "Megatron-LM", 2019); sequences alone may be split in between.
"""
from __future__ import annotations

from passes.graph.layouts import legal
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.axis import Axis
from passes.hardware.gradient_compression import steps_apart
from passes.op_rules.base import Strategy
from passes.replicas.replica_axis_rule import replica_axis_rule
from passes.sharding.strategies.mesh_strategies import AxisRule, any_strategy

FORCED = ("matmul", "attention", "convolution")


def axis_rule(axis: Axis, graph: PlacementGraph) -> AxisRule:
    """The strategies of an operation that an axis allows."""
    if steps_apart(axis.compression):
        return replica_axis_rule(axis, graph)
    if axis.name not in ("dp", "tp"):
        return any_strategy
    wanted = axis.name == "dp"
    weights = set() if wanted else graph.weights | _gradients(graph)
    alone = _of_parameters_alone(graph)

    def fits(op: Operation, strategy: Strategy) -> bool:
        return op.index in alone or all(
            (placement in graph.values[v].batch) == wanted
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
            if isinstance(placement, tuple)
        )

    def divides(op: Operation, strategy: Strategy) -> bool:
        return all(
            legal(graph.values[v], (placement,), (axis,))
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
            if isinstance(placement, tuple)
        )

    def splits(op: Operation, strategy: Strategy) -> bool:
        """True if the work is divided, and divided by the weights if there are any."""
        return strategy.splits and all(
            isinstance(placement, tuple)
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs) if v in weights
        )

    forced = {
        op.index for op in graph.operations
        if op.kind in FORCED and not (wanted and op.index in alone)
        and any(splits(op, s) and fits(op, s) and divides(op, s) for s in op.strategies)
    }

    def allowed(op: Operation, strategy: Strategy) -> bool:
        return fits(op, strategy) and (op.index not in forced or splits(op, strategy))

    return allowed


def _of_parameters_alone(graph: PlacementGraph) -> set[int]:
    """Operations, except views, that depend on parameters alone."""
    values, found = {v.index for v in graph.values if v.kind == "parameter"}, set()
    for op in graph.operations:
        if op.inputs and values.issuperset(op.inputs):
            values.update(op.outputs)
            if op.kind != "view":
                found.add(op.index)
    return found


def _gradients(graph: PlacementGraph) -> set[int]:
    """Gradients of parameters, and the values they come from through views, casts and sums of several."""
    found = set(graph.gradients.values())
    for op in reversed(graph.operations):
        if not op.heavy and found.intersection(op.outputs):
            size = graph.values[op.outputs[0]].spec.elements
            found.update(v for v in op.inputs if graph.values[v].spec.elements == size)
    return found
