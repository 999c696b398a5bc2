"""Final passes over a rewritten joint graph before torch's partitioner splits it into forward and backward."""
from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import fx

from passes import compat
from passes.base import TransformPass
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE
from passes.op_rules.rule_table import is_random
from passes.registry import register


@register
@dataclass(frozen=True)
class InductorJoint(TransformPass):
    """Inductor's own passes over a joint graph: patterns such as attention, constants, and its random numbers."""

    name = "inductor_joint"

    def run(self, graph_module: fx.GraphModule) -> bool:
        graph_module.graph = compat.inductor_joint_passes(graph_module).graph
        return True


@register
@dataclass(frozen=True)
class TagPhases(TransformPass):
    """Tags as forward exactly the nodes that forward outputs need, and random ops of forward whether they are
    needed or not: the default partitioner goes by tag and position, and treats everything before the last node tagged forward
    as computed by then, so nothing is held back for backward here, unless `holds_back`, for another partitioner. Needed
    forward nodes are moved before nodes that depend on tangents: AOTAutograd traces views of a mutated input, which are
    outputs, last."""

    name = "tag_phases"

    forward_outputs: int = 0
    holds_back: bool = False

    def run(self, graph_module: fx.GraphModule) -> bool:
        (output,) = graph_module.graph.find_nodes(op="output")
        returned: tuple = output.args[0]  # type: ignore[assignment]
        stack = [x for x in returned[: self.forward_outputs] if isinstance(x, fx.Node)]
        stack += [x for x in graph_module.graph.nodes
                  if is_random(x.target) and x.meta.get("partitioner_tag") == "is_forward"]
        needed = set(stack)
        while stack:
            for node in stack.pop().all_input_nodes:
                if node not in needed:
                    needed.add(node)
                    stack.append(node)
        for node in graph_module.graph.nodes:
            held = self.holds_back and node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE and node not in needed
            if node.op == "call_function" and not held:
                node.meta["partitioner_tag"] = "is_forward" if node in needed else "is_backward"
        _move_forward(graph_module.graph, needed)
        return True


def _move_forward(graph: fx.Graph, needed: Container[fx.Node]) -> None:
    """Move them before the first call that depends on tangents."""
    first, backward = None, set()
    for node in [*graph.nodes]:
        if node.op == "placeholder":
            backward |= {node} if node.name.startswith("tangents") else set()
        elif node.op == "call_function" and not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
            first = first or node
        elif first is not None and node in needed:
            first.prepend(node)
