"""Find the calls between a head and the loss, and back to the head's gradients.

A head is the last matrix product or convolution before the loss whose result is larger than what it reads, as logits of a large
vocabulary are. From it the region follows all calls that depend on it, and all that depend on the loss's tangent, up to the
products that use up what is as large as the logits: those are the gradients of the hidden state and of the head.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.compat import LOOP_TURN
from passes.graph.fx_nodes import returned_nodes
from passes.op_rules.opaque_calls import leaves_of
from passes.op_rules.rule_table import operator_of

LEAST_GROWTH = 2
"""A head's result has more elements than what it reads by this factor."""
LIKE_LOGITS = 4
"""A value is as large as the logits if it has at least this part of their elements."""


class Unchunkable(Exception):
    """A loss that cannot be computed in chunks. The message says why."""


@dataclass(frozen=True)
class LossRegion:
    """loss: the first scalar that forward returns. heads: largest first. calls: that may be in the loop, in order. late: all
    nodes that depend on the loss's tangent. others: those that depend on another one. least: elements of a value that is as
    large as the logits."""

    loss: Node
    heads: tuple[Node, ...]
    tangent: Node
    calls: tuple[Node, ...]
    late: frozenset[Node]
    others: frozenset[Node]
    least: int

    def is_large(self, node: Node) -> bool:
        return elements(node) >= self.least


def elements(node: Node) -> int:
    """Elements of the largest tensor that a node returns; 0 where sizes differ from call to call."""
    tensors = [x for _, x in leaves_of(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    return max((x.numel() for x in tensors if all(isinstance(n, int) for n in x.shape)), default=0)


def find_region(gm: GraphModule, forward_outputs: int) -> LossRegion:
    """The region of a joint graph with one loss. Raises Unchunkable."""
    tangents = [node for node in gm.graph.find_nodes(op="placeholder") if node.name.startswith("tangents") and node.users]
    scalars = scalar_tangents(gm)
    losses = [node for node in returned_nodes(gm)[:forward_outputs] if node is not None and _is_scalar(node)]
    if len(scalars) != 1 or not losses:
        raise Unchunkable("the graph has no scalar loss" if not scalars else "the graph has several losses")
    (tangent,) = scalars
    heads = _heads(losses)
    if not heads:
        raise Unchunkable("no matrix product before the loss has a result that is larger than what it reads")
    least = elements(heads[0]) // LIKE_LOGITS
    heads = [node for node in heads if elements(node) >= least]
    members, ends = _members(gm, set(heads), tangent)
    late = _depend_on(gm, [tangent])
    large = {node for node in members if node not in ends and elements(node) >= least}
    if not late.intersection(large):
        raise Unchunkable(f"no gradient as large as the result of {heads[0].name} comes from the loss")
    wanted = large | {user for node in large for user in node.users if user in members}
    needed = _needed(wanted, members)
    calls = tuple(node for node in gm.graph.nodes if node in needed)
    others = _depend_on(gm, [x for x in tangents if x is not tangent])
    return LossRegion(losses[0], tuple(heads), tangent, calls, frozenset(late), frozenset(others), max(least, 1))


def scalar_tangents(gm: GraphModule) -> list[Node]:
    """Tangents of scalars, of those that gradients depend on."""
    return [node for node in gm.graph.find_nodes(op="placeholder") if node.name.startswith("tangents") and node.users
            and isinstance(x := node.meta.get("val"), torch.Tensor) and x.dim() == 0]


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _heads(losses: Iterable[Node]) -> list[Node]:
    """The last heavy calls before the losses, of those that enlarge what they read; largest first."""
    found, seen, stack = [], set(), list(losses)
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if operator_of(node.target).heavy not in ("matmul", "convolution"):
            stack += node.all_input_nodes
        elif _enlarges(node) and LOOP_TURN not in node.meta:
            found.append(node)
    return sorted(found, key=lambda node: (-elements(node), node.name))


def matrices_of(head: Node) -> list[Node]:
    """The hidden state that a head multiplies, and its weight."""
    return [x for x in head.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor) and x.meta["val"].dim() > 1]


def _enlarges(node: Node) -> bool:
    value, operands = node.meta.get("val"), matrices_of(node)
    return (isinstance(value, torch.Tensor) and value.is_floating_point() and len(operands) == 2 and elements(operands[0]) > 0
            and elements(node) >= LEAST_GROWTH * elements(operands[0]))


def _members(gm: GraphModule, heads: set[Node], tangent: Node) -> tuple[set[Node], set[Node]]:
    """Calls that depend on heads or on the tangent, and those among them, the ends, behind which none is a member for it: heavy
    calls of backward, and the parts of what they return."""
    members: set[Node] = set()
    late, ends = {tangent}, set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = [x for x in node.all_input_nodes if (x in members or x is tangent)]
        part_of_end = node.target is operator.getitem and node.args[0] in ends
        if part_of_end or node in heads or any(x not in ends for x in inputs):
            members.add(node)
            if late.intersection(node.all_input_nodes):
                late.add(node)
            if part_of_end or node in late and operator_of(node.target).heavy:
                ends.add(node)
    return members, ends


def _depend_on(gm: GraphModule, roots: Iterable[Node]) -> set[Node]:
    found = set(roots)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _needed(wanted: Iterable[Node], within: set[Node]) -> set[Node]:
    """These nodes and all that they depend on, of the given ones."""
    found = set(wanted)
    stack = list(found)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node in within and node not in found:
                found.add(node)
                stack.append(node)
    return found
