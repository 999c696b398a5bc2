"""Repeated block and module of each node of a joint graph.

Every node has a path by its name alone: folding looks for equal work under it, and a plan names nodes by
it. The values that cross between blocks are in `passes.pipeline.find_blocks`.

A block is the outermost entry of the module stack whose path ends in a list index and whose module has submodules
(a decoder layer; not a bare Linear in a Sequential, which is one step of a chain and not a repetition). A backward
node belongs to the block of the forward node with its `seq_nr`; a node without one, such as a sum of gradients, to
the block of its last summand, or of the last forward value where it reads no others, as the backward of `x /= y` does.
"""
from __future__ import annotations

import re
from collections.abc import Callable

from torch.fx import GraphModule, Node

from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE

_INDEXED = re.compile(r"(?:\.|\[)(\d+)\]?$")
_PREFIX = re.compile(r"^[LG]\['(\w+)'\]\.?")
CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


def clean_path(path: str) -> str:
    """`L['self'].model.layers[3]` -> `model.layers.3`"""
    path = _PREFIX.sub("", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\['?(\w+)'?\]", r".\1", path)
    return path.removeprefix("_orig_mod.").removeprefix("_modules.").lstrip(".")


def _is_block(kind: type | str) -> bool:
    module, name = (kind.__module__, kind.__name__) if isinstance(kind, type) else str(kind).rpartition(".")[::2]
    return not module.startswith("torch.nn") or name in CONTAINERS or "Encoder" in name or "Decoder" in name


def block_of(node: Node) -> str:
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        if _INDEXED.search(path) and _is_block(kind):
            return clean_path(path)
    return ""


def module_of(node: Node) -> str:
    """Path of the innermost module that calls the node; "" in the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return clean_path(stack[-1][0]) if stack else ""


def is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def runs_in_backward(node: Node) -> bool:
    """True for backward nodes, and for forward nodes that are held back for backward."""
    return is_backward(node) or node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE


_TRACED = frozenset(("nn_module_stack", "seq_nr", "stack_trace"))
"""Keys in the meta of traced calls, and of those that replace them."""


def assign_blocks(gm: GraphModule) -> dict[Node, str]:
    """Block of every node, "" where there is none."""
    return _assign(gm, block_of)


def assign_modules(gm: GraphModule) -> dict[Node, str]:
    """Module of every node, "" for calls of the model itself."""
    return _assign(gm, module_of)


def _assign(gm: GraphModule, of_forward: Callable[[Node], str]) -> dict[Node, str]:
    by_sequence: dict[int, str] = {}
    blocks: dict[Node, str] = {}
    order: dict[Node, int] = {}
    for position, node in enumerate(gm.graph.nodes):
        order[node] = position
        # A sum of gradients carries the `seq_nr` of whatever ran last in forward.
        number = None if node.meta.get("is_gradient_acc") else node.meta.get("seq_nr")
        own = "" if is_backward(node) else of_forward(node)
        if is_backward(node):
            own = by_sequence.get(number, "") if number is not None else ""
        elif number is not None and not by_sequence.get(number):
            by_sequence[number] = own
        # No `seq_nr`, or that of a forward node that is gone (a view that was cloned for each reader).
        if is_backward(node) and number not in by_sequence:
            # The last summand: the others may have passed through many blocks (a residual stream).
            placed = [x for x in node.all_input_nodes if blocks.get(x)]
            summands = [x for x in placed if is_backward(x)] or placed
            own = blocks[max(summands, key=order.__getitem__)] if summands else ""
        if node.op == "call_function" and not _TRACED.intersection(node.meta):  # a compiler's pattern made it
            operands = [x for x in node.all_input_nodes if blocks.get(x)]
            own = blocks[max(operands, key=order.__getitem__)] if operands else own
        blocks[node] = own
    return blocks
