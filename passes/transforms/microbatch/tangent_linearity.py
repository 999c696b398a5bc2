"""Linearity of gradients in the loss's tangent: whether gradients of one tangent can be scaled to another.

Backward is linear as autograd writes it. A hook that clips a gradient, or a custom Function whose backward takes its sign or
ignores it, is not: then the gradients of each tangent have to be computed.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.graph.fx_nodes import is_collective, returned_nodes
from passes.op_rules.call_rules import operand_nodes, rule_of
from passes.transforms.microbatch.loop_markers import COLLECTS, ENTERS

aten = torch.ops.aten
_ZEROS = frozenset((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default))
_FULL: dict[Any, int] = {
    aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0, aten.new_full.default: 2}
"""Operators that fill a tensor with a number, and its place among their arguments."""


def nonlinear_calls(gm: GraphModule, tangent: str, forward_outputs: int) -> list[str]:
    """Names of the calls by which gradients are not linear in a tangent; of the gradients that do not depend on it, too.

    gm: a joint graph, possibly with the markers of a loop. Calls of unknown operators count as not linear.
    """
    (given,) = (node for node in gm.graph.find_nodes(op="placeholder") if node.name == tangent)
    calls = LinearCalls(given)
    for node in gm.graph.nodes:
        calls.note(node)
    results = [node for node in returned_nodes(gm)[forward_outputs:] if node is not None]
    return [*(node.name for node in gm.graph.nodes if node in calls.found),
            *(node.name for node in results if node not in calls.linear and node not in calls.zeros)]


class LinearCalls:
    """Which calls are linear in a tangent, noted in the order of the graph. linear: all nodes that depend on it; zeros: those
    that are zero; found: calls that are not linear; calls after them are not found again."""

    def __init__(self, tangent: Node) -> None:
        self.linear, self.zeros, self.found = {tangent}, set[Node](), set[Node]()

    def note(self, node: Node) -> None:
        if node.op != "call_function":
            return
        if self.linear.isdisjoint(node.all_input_nodes):
            if _is_zero(node, self.zeros):
                self.zeros.add(node)
            return
        if not _is_linear(node, self.linear, self.zeros):
            self.found.add(node)
        self.linear.add(node)


def _is_linear(node: Node, linear: set[Node], zeros: set[Node]) -> bool:
    if node.target is operator.getitem or node.target in (*ENTERS, *COLLECTS) or is_collective(node.target):
        return True
    rule = rule_of(node)
    if rule is None:
        return False
    operands = operand_nodes(node)
    given = {k for k, x in enumerate(operands) if x in linear}
    nothing = {k for k, x in enumerate(operands) if x in zeros}
    return any(given <= group <= given | nothing for group in rule.linear)


def _is_zero(node: Node, zeros: set[Node]) -> bool:
    """True if a call returns zeros: it fills a tensor with them, or is linear in one."""
    if node.target in _ZEROS:
        return True
    if node.target in _FULL:
        return _argument(node, _FULL[node.target]) == 0
    return bool(zeros.intersection(node.all_input_nodes)) and _is_linear(node, zeros, zeros)


def _argument(node: Node, place: int) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get("fill_value")
