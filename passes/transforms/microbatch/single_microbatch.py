"""Add loop markers to a graph whose whole step is one microbatch, for `passes.transforms.microbatch.loop_split`.

Everything is in the loop except random numbers and their operands, which all ranks of a pipeline draw before it, in the
order of one device.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.op_rules.recomputable import uses_rng
from passes.registry import register
from passes.transforms.microbatch.loop_markers import ADD_UP, TAKE
from passes.transforms.rewriting.call_inserter import CallInserter


@register
@dataclass(frozen=True)
class MarkSingleMicrobatch(TransformPass):
    """Takes every input whole, and collects every output."""

    name = "mark_single_microbatch"

    def run(self, graph_module: GraphModule) -> bool:
        graph, fake_mode = graph_module.graph, fake_mode_of(graph_module)
        before = _drawn(graph_module)
        placeholders = graph.find_nodes(op="placeholder")
        first = next((node for node in graph.nodes if node.op != "placeholder"), graph.output_node())
        inside: set[Node] = set()
        for node in placeholders:
            users = [user for user in node.users if user not in before and user.op != "output"]
            if isinstance(value := node.meta.get("val"), torch.Tensor) and users:
                like = users[0]
                taken = CallInserter(graph, first, like=like, fake_mode=fake_mode)(
                    TAKE, node, [1, *value.shape], 0, list(value.shape))
                inside.add(taken)
                for user in users:
                    user.replace_input_with(node, taken)
        for node in graph.nodes:
            if inside.intersection(node.all_input_nodes):
                inside.add(node)
        output = graph.output_node()
        for node in dict.fromkeys(x for x in output.all_input_nodes if x in inside):
            output.replace_input_with(node, CallInserter(graph, output, like=node, fake_mode=fake_mode)(ADD_UP, node))
        graph_module.recompile()
        return True


def _drawn(gm: GraphModule) -> set[Node]:
    """Calls that draw random numbers, and all calls they depend on, except those that depend on a tangent."""
    late: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name.startswith("tangents") or late.intersection(node.all_input_nodes):
            late.add(node)
    stack = [node for node in gm.graph.nodes if uses_rng(node) and node not in late]
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [x for x in node.all_input_nodes if x.op == "call_function"]
    return found
