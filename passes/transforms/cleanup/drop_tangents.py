"""Remove the computation of gradients from tangents that are zero.

A model that returns its loss along with other outputs, such as logits, has a tangent for each; if only the loss is
differentiated, the others are zeros, as large as the outputs themselves.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.op_rules.call_rules import operand_nodes, rule_of
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class DropTangents(TransformPass):
    """tangents: names of the placeholders that are zero. Removes calls that are linear in zeros, and additions of zeros."""

    name = "drop_tangents"

    tangents: frozenset[str] = frozenset()

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        zeros = {node for node in graph.find_nodes(op="placeholder") if node.name in self.tangents}
        if not any(node.users for node in zeros):
            return False
        for node in list(graph.nodes):
            if not zeros.intersection(node.all_input_nodes):
                continue
            if node.op == "call_function" and _is_zero(node, zeros):
                zeros.add(node)
            elif (other := _other_addend(node, zeros)) is not None:
                node.replace_all_uses_with(other)
            else:
                insert = CallInserter(graph, node, like=node, fake_mode=fake_mode_of(graph_module))
                for x in (x for x in node.all_input_nodes if x in zeros):  # in order: all ranks write the same graph
                    value = x.meta["val"]
                    node.replace_input_with(x, insert(
                        aten.full.default, list(value.shape), 0, dtype=value.dtype, device=value.device, pin_memory=False))
        graph.eliminate_dead_code()
        return True


def _is_zero(node: Node, zeros: set[Node]) -> bool:
    """True if the call is linear in a zero operand."""
    if node.target is operator.getitem:
        return True
    rule = rule_of(node)
    if rule is None or rule.aside:
        return False
    given = {k for k, x in enumerate(operand_nodes(node)) if x in zeros}
    return any(group and group <= given for group in rule.linear)


def _other_addend(node: Node, zeros: set[Node]) -> Node | None:
    if node.target is not aten.add.Tensor or node.kwargs or len(operands := operand_nodes(node)) != 2:
        return None
    other = next((x for x in operands if x not in zeros), None)
    if other is None:
        return None
    own, result = other.meta["val"], node.meta["val"]
    return other if own.shape == result.shape and own.dtype == result.dtype else None
