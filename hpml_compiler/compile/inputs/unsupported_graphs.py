"""Refuse graphs that cannot be split or compiled before they are traced, with a workaround in the error."""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from passes.errors import BadInput

SPARSE_AT = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4, torch.embedding_bag: 6}
"""Look-up function -> position of its argument `sparse`."""


def check_supported(gm: GraphModule) -> None:
    """Raises BadInput for a Dynamo graph that is not supported, the same on all ranks."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and torch.is_grad_enabled() and _sparse(node):
            raise BadInput(
                "a sparse gradient cannot pass through a compiled graph (nor does it with torch's own compilers)",
                f"{getattr(node.target, '__name__', node.target)} with sparse=True, {_module(node)}",
                "make the embedding with sparse=False; or leave it out of the graph, whole on every rank, and keep its "
                "optimizer: embedding.forward = torch.compiler.disable(embedding.forward) before the first call",
            )


def _sparse(node: Node) -> bool:
    position = SPARSE_AT.get(node.target)  # pyright: ignore[reportArgumentType]
    if position is None:
        return False
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("sparse")
    return given is True


def _module(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"module {stack[-1][0]}" if stack else "outside of a module"
