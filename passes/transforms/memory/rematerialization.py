"""Recompute activations that are not saved, in backward just before they are read.

Afterwards backward reads exactly the saved values of forward, so that partitioning the graph only follows its
readers (`passes.compat.split_by_tags`).
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.annotations import read
from passes.base import TransformPass
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION, STORAGE_PROGRAM
from passes.errors import HpmlError
from passes.graph.fx_nodes import WAIT
from passes.op_rules.recomputable import is_recomputable
from passes.op_rules.rule_table import operator_of
from passes.registry import register

AGAIN = "_again"
"""Suffix of the names of recomputing nodes."""


@register
@dataclass(frozen=True)
class Rematerialize(TransformPass):
    """Reads `CHECKPOINT_DECISION` and `STORAGE_PROGRAM`. Tags forward nodes as forward, and nodes that run in backward as
    backward."""

    name = "rematerialize"
    requires = (CHECKPOINT_DECISION, STORAGE_PROGRAM)
    preserves = (CHECKPOINT_DECISION,)

    def run(self, graph_module: fx.GraphModule) -> bool:
        kept, program = read(CHECKPOINT_DECISION, graph_module), read(STORAGE_PROGRAM, graph_module)
        backward = {run.name for run in program.runs if run.backward}
        once = {run.name for run in program.runs if not run.repeatable}
        if missing := kept.names - {node.name for node in graph_module.graph.nodes}:
            raise HpmlError(f"there is no {', '.join(sorted(missing))} to save", "rematerialize",
                            "the checkpointing decision is of another graph: this is a bug in the checkpointing pass")
        return _RematerializationRewrite(graph_module.graph, kept.names, backward, once).run()


class _RematerializationRewrite:
    """once: names of calls that cannot be recomputed. copies: of forward nodes in backward."""

    def __init__(self, graph: fx.Graph, kept: frozenset[str], backward: set[str], once: set[str]):
        self.graph, self.kept, self.once = graph, kept, once
        self.copies: dict[fx.Node, fx.Node] = {}
        self.in_backward: set[fx.Node] = set()
        for node in graph.nodes:  # views and parts of backward results belong to backward
            if node.name in backward or (node.op == "placeholder" and "tangent" in str(node.target)) or any(
                    x in self.in_backward for x in node.all_input_nodes):
                self.in_backward.add(node)

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                node.meta["partitioner_tag"] = "is_backward" if node in self.in_backward else "is_forward"
            if node.op == "call_function" and node in self.in_backward:
                for read_by in dict.fromkeys(node.all_input_nodes):
                    there = self.there(read_by, node)
                    if there is not read_by:
                        node.replace_input_with(read_by, there)
        for node in reversed(self.copies):  # as gathers of parameters that backward alone reads
            if not node.users:
                self.graph.erase_node(node)
        return True

    def there(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node to read in backward: itself, if it is saved, an input or computed in backward, else a copy before the
        reader."""
        stack = [node]
        while stack:
            top = stack[-1]
            if self._is_there(top):
                stack.pop()
                continue
            missing = [x for x in top.all_input_nodes if not self._is_there(x)]
            if missing:
                stack += missing[::-1]
                continue
            stack.pop()
            self.copies[top] = self._copy(top, before)
        return self.copies.get(node, node)

    def _is_there(self, node: fx.Node) -> bool:
        """Numbers, such as sizes, are always saved."""
        if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)):
            return True
        return (node.op != "call_function" or node in self.in_backward or node in self.copies or node.name in self.kept)

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        # Nodes without memory, such as views, are no ops of the program; an element of a tuple belongs to its call.
        if node.name in self.once or not (node.target is WAIT or operator_of(node.target).view or is_recomputable(node)):
            raise HpmlError(f"{node.name} ({node.target}) cannot be recomputed and is not saved", "rematerialize",
                            "save it: this is a bug in the checkpointing pass")
        with self.graph.inserting_before(before):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: self.copies.get(x, x))
            copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name + AGAIN)
        copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
        return copy

