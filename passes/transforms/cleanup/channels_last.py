"""Convert operands of convolutions to inductor's memory format (channels last) by explicit calls in the graph.

Inductor would copy the weights itself, all of them at the start of forward, and save the copies for backward in place of the
weights, which are in memory anyway. Explicit calls run just before their readers, in forward and again in
backward, and are visible to the memory simulation.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import compat
from passes.base import TransformPass
from passes.graph.fx_nodes import is_collective
from passes.op_rules.families.convolutions import OPERANDS
from passes.op_rules.rule_table import is_pointwise, name_of, operator_of, packet_name
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

LAST = torch.channels_last
DIMS = 4


@register
@dataclass(frozen=True)
class ChannelsLast(TransformPass):
    """Results of convolutions have that format already, except for gradients that start from a scalar, as
    of a mean. Inductor would write such a gradient in the default format, and copy it for each convolution that reads it."""

    name = "channels_last"

    def run(self, graph_module: fx.GraphModule) -> bool:
        graph = graph_module.graph
        if not compat.computes_channels_last(graph_module):
            return False
        fake_mode = compat.fake_mode_of(graph_module)
        joined = _join_in_order(graph, fake_mode)
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            for x in node.args[:OPERANDS.get(name_of(node.target), 0)]:
                if x not in copies and (_is_given(x) or _follows_constant(x)) and _is_in_another_order(x):
                    copies[x] = _in_order(graph, node, x, fake_mode)
                if x in copies:
                    node.replace_input_with(x, copies[x])
        return bool(copies) or joined


def _join_in_order(graph: fx.Graph, fake_mode: Any) -> bool:
    """Convert concatenated operands part by part: if one part has no known format, inductor puts the whole result
    into the default one, and each convolution that reads it, forward or backward, copies it. Parts that others read
    come from a convolution, or are computed into the result (`passes.transforms.cleanup.unalias_cat`)."""
    changed = False
    for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        if any(cat in user.args[:OPERANDS.get(name_of(user.target), 0)] for user in cat.users):
            parts = [_in_order(graph, cat, x, fake_mode) if len(x.users) == 1 and _is_in_another_order(x) else x
                     for x in cat.args[0]]
            changed |= parts != list(cat.args[0])
            cat.args = (parts, *cat.args[1:])
    return changed


def _in_order(graph: fx.Graph, before: fx.Node, x: fx.Node, fake_mode: Any) -> fx.Node:
    return CallInserter(graph, before, fake_mode=fake_mode)(torch.ops.aten.clone.default, x, memory_format=LAST)


def _is_in_another_order(x: fx.Node) -> bool:
    value = x.meta["val"]
    return value.dim() == DIMS and not value.is_contiguous(memory_format=LAST)


def _is_given(x: fx.Node) -> bool:
    """True for graph inputs and gathered inputs, through pointwise calls."""
    stack, seen = [x], {x}
    while stack:
        node = stack.pop()
        if node.op == "call_function":
            if not (is_pointwise(node.target) or is_collective(node.target) or operator_of(node.target).view
                    or packet_name(node.target) == "clone"):
                return False
            new = [each for each in node.all_input_nodes if each not in seen]
            seen.update(new)
            stack += new
    return True


def _follows_constant(x: fx.Node) -> bool:
    """True if nothing determines the memory format: results of pointwise calls have the format of their first operand, and an
    expanded scalar, or a scalar per image, gets the default one."""
    while x.op == "call_function" and is_pointwise(x.target):
        same = (each for each in x.all_input_nodes if _shape(each) == _shape(x))
        x = next(same, None)  # pyright: ignore[reportAssignmentType]
        if x is None:
            return False
    return x.op == "call_function" and packet_name(x.target) in {"expand", "full"}


def _shape(x: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(x.meta.get("val"), "shape", ()))
