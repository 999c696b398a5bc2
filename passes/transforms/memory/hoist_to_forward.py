"""Move calls that are traced in backward but depend on forward alone to their operands in forward.

Autograd's formulas are traced in the backward part of the graph, even where they read forward values alone. If saved there,
their results would be computed at the end of forward, and their operands would stay in memory until then.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.base import TransformPass
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE
from passes.op_rules.rule_table import is_pointwise, operator_of
from passes.registry import register


@register
@dataclass(frozen=True)
class HoistToForward(TransformPass):
    """Only light calls, and views."""

    name = "hoist_to_forward"

    def run(self, graph_module: fx.GraphModule) -> bool:
        backward: set[fx.Node] = set()
        begun = changed = False
        for node in list(graph_module.graph.nodes):
            if _begins_backward(node) or any(x in backward for x in node.all_input_nodes):
                backward.add(node)
                begun |= node.op == "call_function"
            elif begun and node.op == "call_function" and (is_pointwise(node.target) or operator_of(node.target).view):
                made = [x for x in node.all_input_nodes if x.op == "call_function"]
                if made:
                    max(made).append(node)
                    changed = True
        return changed


def _begins_backward(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return "tangent" in str(node.target)
    return node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE
