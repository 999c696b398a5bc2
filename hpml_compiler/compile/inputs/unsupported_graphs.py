"""Refuse graphs that cannot be split or compiled before they are traced, with a workaround in the error, and warn of those that
Dynamo gives another meaning than eager mode."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from passes.errors import BadInput

log = logging.getLogger("hpml")
SPARSE_AT = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4, torch.embedding_bag: 6}
"""Look-up function -> position of its argument `sparse`."""


def check_supported(gm: GraphModule) -> None:
    """Raises BadInput for a Dynamo graph that is not supported, the same on all ranks."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and torch.is_grad_enabled() and _sparse(node):
            raise BadInput(
                "compiled graphs do not support sparse gradients (nor do torch's own compilers)",
                f"{getattr(node.target, '__name__', node.target)} with sparse=True, {_module(node)}",
                "create the embedding with sparse=False; or exclude it from the graph, replicated on every rank, and keep "
                "its optimizer: embedding.forward = torch.compiler.disable(embedding.forward) before the first call",
            )


def warn_of_reentrant_checkpoints(gm: GraphModule, given: Sequence[Any]) -> None:
    """Log a warning for reentrant checkpoints without an input that requires a gradient. Eager's cut off the gradients of the
    parameters inside; Dynamo makes one kind of checkpoint of both. given: inputs of the Dynamo graph."""
    checkpoints = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    if not checkpoints or not torch.is_grad_enabled():
        return
    parameters = {node for node, value in zip(gm.graph.find_nodes(op="placeholder"), given) if isinstance(value, nn.Parameter)}
    for node in checkpoints:
        trained = {each for each in node.all_input_nodes
                   if getattr(each.meta.get("example_value"), "requires_grad", False)}
        if node.kwargs.get("use_reentrant") is not False and trained and trained <= parameters:
            log.warning("parameters inside torch.utils.checkpoint(use_reentrant=True), %s, get gradients although no "
                        "input of it requires one: in eager mode their gradients are None unless they are passed as arguments. "
                        "use_reentrant=False behaves the same in both", _module(node))


def _sparse(node: Node) -> bool:
    position = SPARSE_AT.get(node.target)  # pyright: ignore[reportArgumentType]
    if position is None:
        return False
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("sparse")
    return given is True


def _module(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"module {stack[-1][0]}" if stack else "outside of a module"
