"""Graphs that Dynamo captured with symbolic sizes, as it does from the second batch size on, with numbers in their place.

Ranks plan one batch size, and another one compiles another graph. With numbers in the graph from the start, everything that
asks for fixed sizes (outputs that stay sharded, the script's loss in the step, chunks of the loss) has them.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hpml_compiler.compile.inputs.graph_inputs import guard_on_rows, sizes_are_numbers
from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.session_state import state_of

MOST_FIXED = 2
"""Graphs of a frame compiled for fixed sizes on one device: for the last batch of an epoch, not for each length of a text."""
Call = Callable[..., Any]


class FixedSizes(Counter[str]):
    """Graphs of symbolic sizes that were compiled for fixed ones on one device, by frame."""

    is_of_models = True


def may_fix_sizes(gm: GraphModule) -> bool:
    """True if the sizes of one more graph of this frame may become numbers on one device. Counts it."""
    counts, frame = state_of(FixedSizes), compat.frame_being_compiled()
    if counts[frame] >= MOST_FIXED or compat.asks_for_dynamic_sizes(gm):
        return False
    counts[frame] += 1
    return True


def with_fixed_sizes(gm: GraphModule, given: Sequence[Any], compile_: Callable[[GraphModule, Sequence[Any]], Call]) -> Call:
    """Compile the graph with numbers as sizes; Dynamo guards on them."""
    if not any(isinstance(x, torch.SymInt) for x in given):
        return compile_(gm, given)
    guard_on_rows(gm)
    sizes_are_numbers(gm, [x for x in given if compat.is_fake(x)])
    numbers = {node: number for node in gm.graph.nodes if isinstance(value := node.meta.get("example_value"), torch.SymInt)
               and (number := compat.static_int(value)) is not None}
    if not numbers.keys().isdisjoint(node for node in returned_nodes(gm) if node is not None):
        return compile_(gm, given)
    kept = [k for k, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node not in numbers]
    call = compile_(_with_numbers(gm, numbers), [_without_symbols(given[k]) for k in kept])

    @compat.untraced
    def with_tensors(*args: Any) -> Any:
        return call(*[args[k] for k in kept])

    return with_tensors


def _with_numbers(gm: GraphModule, numbers: dict[Node, int]) -> GraphModule:
    """A copy: Dynamo passes one argument for each placeholder of the graph itself."""
    made = copy_graph(gm)
    for node, copied in reversed(list(zip(gm.graph.nodes, made.graph.nodes, strict=True))):
        if node in numbers:
            copied.replace_all_uses_with(numbers[node])  # type: ignore[arg-type]
            made.graph.erase_node(copied)
        elif "example_value" in node.meta:
            copied.meta["example_value"] = compat.pytree.tree_map(_without_symbols, node.meta["example_value"])
    made.recompile()
    return made


def _without_symbols(value: Any) -> Any:
    return compat.substitute_symbols(value) if compat.is_fake(value) or isinstance(value, torch.SymInt) else value
