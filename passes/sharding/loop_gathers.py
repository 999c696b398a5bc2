"""Collectives of sharded parameters in a microbatch loop: once for the loop, or again in each microbatch.

Gathered once, a parameter is unsharded while the loop runs; gathered in each microbatch, in forward and again in backward, only
while a block reads it. A gradient is accumulated unsharded and reduced after the loop, or reduced in each microbatch and
accumulated as a shard. These are FSDP's `reshard_after_forward` and `set_requires_gradient_sync` under gradient
accumulation, for each parameter (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3; the bytes of either are ZeRO-3's and
ZeRO-2's: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020).
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from passes.graph.decision import AFTER, MicrobatchPlacement
from passes.graph.placement_graph import PlacementGraph
from passes.op_rules.base import PARTIAL, REPLICATE, format_placement

WHOLE, SUM = format_placement(REPLICATE), format_placement(PARTIAL)
COPIES = ("aten._to_copy.default", "aten.clone.default", "prims.convert_element_type.default")
"""Calls that, like views, may run in each microbatch: casts."""


@dataclass(frozen=True)
class LoopGathers:
    """Names of parameters in the graph. gathered: those that each microbatch gathers; others are gathered before the loop.
    reduced: those whose gradients each microbatch reduces; others are reduced after the loop."""

    gathered: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()


ONCE = LoopGathers()
"""No microbatch repeats anything."""


def repeatable_gathers(graph: PlacementGraph, times: MicrobatchPlacement) -> frozenset[str]:
    """Parameters that may be gathered in each microbatch: only the loop reads what is computed from them, and that is cheap."""
    outputs = {v for v, _ in graph.outputs}
    return frozenset(value.name for value in graph.values if value.kind == "parameter"
                     and _only_in_loop(graph, times, value.index, outputs))


def _only_in_loop(graph: PlacementGraph, times: MicrobatchPlacement, parameter: int, outputs: set[int]) -> bool:
    stack, seen = [parameter], {parameter}
    while stack:
        v = stack.pop()
        if v in outputs:
            return False
        for u in graph.values[v].users:
            op, reads, makes = graph.operations[u], times.reads[u], times.makes[u]
            if any(label != WHOLE for w, label in zip(op.inputs, reads) if w == v):
                return False  # rows of it, or read after the loop
            if all(label == WHOLE for label in (*reads, *makes)):
                if op.kind != "view" and op.target not in COPIES:
                    return False
                stack += [w for w in op.outputs if w not in seen]
                seen.update(op.outputs)
    return True


def repeatable_reductions(graph: PlacementGraph, times: MicrobatchPlacement) -> frozenset[str]:
    """Parameters whose gradients may be reduced in each microbatch: those are accumulated in the loop, then viewed at most."""
    return frozenset(graph.values[p].name for v, p in graph.outputs if p is not None and _to_accumulated(graph, times, v))


def reduced_in_loop(graph: PlacementGraph, times: MicrobatchPlacement, repeats: LoopGathers,
                    ) -> tuple[MicrobatchPlacement, frozenset[int]]:
    """The placements in time where some gradients are reduced in the loop, and the values on the way to their reductions."""
    reads, makes, found = list(times.reads), list(times.makes), set[int]()
    for v, p in graph.outputs:
        if p is not None and graph.values[p].name in repeats.reduced:
            for w in _to_accumulated(graph, times, v):
                found.add(w)
                producer = graph.values[w].producer
                assert producer is not None, "it is accumulated in the loop"
                if AFTER in makes[producer]:  # a view
                    reads[producer], makes[producer] = (SUM,), (SUM,)
    return replace(times, reads=tuple(reads), makes=tuple(makes)), frozenset(found)


def _to_accumulated(graph: PlacementGraph, times: MicrobatchPlacement, v: int) -> list[int]:
    """From a gradient back through views to the value that is accumulated in the loop; empty if something else reads them."""
    returned, found = Counter(w for w, _ in graph.outputs), [v]
    if returned[v] > 1 or graph.values[v].users:
        return []
    while (producer := graph.values[found[-1]].producer) is not None:
        op = graph.operations[producer]
        if times.makes[producer][op.outputs.index(found[-1])] == SUM:
            return found
        if op.kind != "view" or len(op.inputs) != 1 or len(op.outputs) != 1 or returned[op.inputs[0]]:
            return []
        found.append(op.inputs[0])
        if graph.values[found[-1]].users != (producer,):
            return []
    return []
