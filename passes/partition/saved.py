"""Which forward values a step has to keep for its backward part: what the graph says or, of one that is made by hand, an
estimate.

A view or a pointwise operation costs little next to the bytes of its result, and inductor's partitioner recomputes
it in backward; so what has to be kept are the nearest results of reductions and heavy operations. Parameters and inputs
are there anyway.
"""
from __future__ import annotations

from passes.graph.placement_graph import Operation, PlacementGraph

RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal")
REDUCING = ("sum", "amax", "amin", "mean", "var", "max_pool", "cumsum", "sort", "topk", "argmax", "any", "all")


def recomputable(op: Operation) -> bool:
    if op.heavy or not op.ruled:
        return False
    name = op.target.split(".")[1] if "." in op.target else op.target
    return not any(name.startswith(word) or f"_{word}" in name for word in RANDOM + REDUCING)


def saved_values(graph: PlacementGraph) -> frozenset[int]:
    """Indices of forward values that are kept."""
    if graph.saved is not None:
        return graph.saved
    kept: set[int] = set()
    seen: set[int] = set()
    stack = [v for op in graph.operations if op.backward for v in op.inputs]
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        producer = graph.values[v].producer
        if producer is None or graph.operations[producer].backward:
            continue
        op = graph.operations[producer]
        if recomputable(op):
            stack.extend(op.inputs)
        else:
            kept.add(v)
    return frozenset(kept)
