"""Phase tags on the nodes of a traced joint graph: forward or backward.

AOTAutograd tags the autograd engine's calls, and gives each the `seq_nr` of its forward call. The backward
of a custom `autograd.Function` is a graph that Dynamo made, and is interpreted: its nodes come without a tag, and with the
`seq_nr` of whatever ran last in forward. They are tagged here by their operands, and numbered by their neighbors.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

TAG, NUMBER = "partitioner_tag", "seq_nr"


def mark_phases(joint: GraphModule, forward_outputs: int) -> None:
    """Tag each untagged call: as forward if the forward outputs need it, else as backward, where it is one."""
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    untagged = [node for node in calls if node.meta.get(TAG) is None]
    if not untagged:
        return
    returned = pytree.tree_leaves(joint.graph.output_node().args, is_leaf=lambda x: x is None or isinstance(x, Node))
    needed = _needed(x for x in returned[:forward_outputs] if isinstance(x, Node))
    for node in untagged:
        node.meta[TAG] = "is_forward" if node in needed else "is_backward"
    _number(calls, {node for node in untagged if node not in needed})


def _needed(results: Iterable[Node]) -> set[Node]:
    stack = list(results)
    found = set(stack)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _number(calls: Sequence[Node], interpreted: set[Node]) -> None:
    """The engine runs the backward of the call with the highest remaining `seq_nr`. So interpreted calls get a forward
    `seq_nr` between those of their neighbors: the highest in the same module, or the highest at all."""
    forward: dict[int, str] = {}
    for node in calls:
        if node.meta[TAG] == "is_forward" and node.meta.get(NUMBER) is not None:
            forward.setdefault(node.meta[NUMBER], _module(node))
    below: int | None = None
    bounds: dict[Node, int] = {}
    for node in reversed(calls):
        if node in interpreted:
            bounds[node] = -1 if below is None else below
        elif _counts(node):
            below = node.meta[NUMBER]
    above: int | None = None
    for node in calls:
        if node in interpreted:
            between = [n for n in forward if bounds[node] < n and (above is None or n < above)]
            same = [n for n in between if forward[n] == _module(node)]
            node.meta[NUMBER] = max(same or between, default=None)
        elif _counts(node):
            above = node.meta[NUMBER]


def _counts(node: Node) -> bool:
    """True if the engine called it for the forward call of its `seq_nr`; sums of gradients have that of the last one."""
    return node.meta[TAG] == "is_backward" and not node.meta.get("is_gradient_acc") and node.meta.get(NUMBER) is not None


def _module(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""
