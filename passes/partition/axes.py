"""What the name of a pinned mesh axis fixes: `dp` splits the batch, `tp` splits anything else, other names nothing.

On a pinned axis the heavy operations that can be split that way have to be: a pin is a wish, not a hint.
"""
from __future__ import annotations

from passes.partition.choices import AxisRule
from passes.placement_graph import Operation, PlacementGraph
from passes.rules.base import Strategy

FORCED = ("matmul", "attention", "convolution")


def axis_rule(name: str, size: int, graph: PlacementGraph) -> AxisRule:
    """Which strategies of an operation an axis allows."""
    if name not in ("dp", "tp"):
        return lambda op, strategy: True
    wanted = name == "dp"

    def fits(op: Operation, strategy: Strategy) -> bool:
        return all(
            (placement in graph.values[v].batch) == wanted
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
            if isinstance(placement, tuple)
        )

    def divides(op: Operation, strategy: Strategy) -> bool:
        return all(
            graph.values[v].factors[placement[0]][placement[1]] % size == 0
            for v, placement in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
            if isinstance(placement, tuple)
        )

    forced = {
        op.index for op in graph.operations
        if op.kind in FORCED and any(s.splits and fits(op, s) and divides(op, s) for s in op.strategies)
    }

    def allowed(op: Operation, strategy: Strategy) -> bool:
        return fits(op, strategy) and (strategy.splits or op.index not in forced)

    return allowed


