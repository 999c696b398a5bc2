"""What the name of a pinned mesh axis fixes: `dp` splits the batch, `tp` splits weights and anything else but the batch,
other names nothing. What is computed of parameters alone, such as a cast, may be split on any: where they are stored in parts,
it is done before they are gathered.

On a pinned axis the heavy operations that can be split that way have to be: a pin is a wish, not a hint. On `tp` that
is by their weights where they have any (Shoeybi et al., "Megatron-LM", 2019); sequences alone may be split in between.
"""
from __future__ import annotations

from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.axis import Axis
from passes.op_rules.base import Strategy
from passes.sharding.strategies.mesh_strategies import AxisRule
from passes.sharding.strategies.zero_levels import weights_of

FORCED = ("matmul", "attention", "convolution")


def axis_rule(axis: Axis, graph: PlacementGraph) -> AxisRule:
    """Which strategies of an operation an axis allows."""
    if axis.name not in ("dp", "tp"):
        return lambda op, strategy: True
    wanted = axis.name == "dp"
    weights = set() if wanted else weights_of(graph) | _gradients(graph)
    alone = _of_parameters_alone(graph)

    def fits(op: Operation, strategy: Strategy) -> bool:
        return op.index in alone or all(
            (placement in graph.values[v].batch) == wanted
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
            if isinstance(placement, tuple)
        )

    def divides(op: Operation, strategy: Strategy) -> bool:
        return all(
            graph.values[v].factors[placement[0]][placement[1]] % axis.size == 0
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
            if isinstance(placement, tuple)
        )

    def splits(op: Operation, strategy: Strategy) -> bool:
        """Whether the work is shared out, and that by the weights if there are any."""
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
    """Operations, but for views, that read parameters, or what others of them make, and nothing else."""
    values, found = {v.index for v in graph.values if v.kind == "parameter"}, set()
    for op in graph.operations:
        if op.inputs and values.issuperset(op.inputs):
            values.update(op.outputs)
            if op.kind != "view":
                found.add(op.index)
    return found


def _gradients(graph: PlacementGraph) -> set[int]:
    """Gradients of parameters, back through views, casts and sums of several to where they are made."""
    found = {v for v, parameter in graph.outputs if parameter is not None}
    for op in reversed(graph.operations):
        if not op.heavy and found.intersection(op.outputs):
            size = graph.values[op.outputs[0]].spec.elements
            found.update(v for v in op.inputs if graph.values[v].spec.elements == size)
    return found
