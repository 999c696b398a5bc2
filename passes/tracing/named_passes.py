"""Run passes that a user names on a traced graph, before hpml analyzes it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from passes.base import PassError
from passes.graph.fx_nodes import returned_nodes
from passes.manager import PassManager
from passes.registry import lookup

Signature = tuple[Any, ...]


def run_named_passes(names: Sequence[str], gm: GraphModule) -> None:
    """Run these registered passes on a graph, in order, each with the defaults of its fields.

    gm: a joint graph, or a forward graph, as AOTAutograd traced it. Raises BadInput for a name that no pass has, and PassError
    where the sequence lacks what one of them requires, and where a pass leaves a call without a fake result (`meta["val"]`), or
    the graph with other inputs or results than it had.
    """
    if not names:
        return
    manager = PassManager(tuple(lookup(name)() for name in names))
    before = _signature(gm)
    manager(gm)
    where = f"options['passes'] = {list(names)}"
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise PassError(f"the call {node.name!r} has no fake result", where,
                            "give each node that a pass inserts meta['val'], as the node has that it stands for")
    if (after := _signature(gm)) != before:
        raise PassError(f"the graph had inputs and results {before}, and has {after} now", where,
                        "a pass may change what is computed, and not the number, shape or type of inputs and results")


def _signature(gm: GraphModule) -> Signature:
    """Shapes and types of inputs and results."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(tuple(_kind(node.meta.get("val") if node is not None else None) for node in nodes)
                 for nodes in (placeholders, returned_nodes(gm)))


def _kind(value: Any) -> Any:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else type(value).__name__
