"""Compute once more in backward what is not kept from forward, just before it is read.

After it, what backward reads of forward is what was decided to be kept, so that cutting the graph in two is a matter of
who reads what (`passes.compat.split_by_tags`).
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
from passes.op_rules.view_names import VIEWS, view_name
from passes.registry import register

AGAIN = "_again"
"""What the names of nodes end with that compute once more."""


@register
@dataclass(frozen=True)
class Rematerialize(TransformPass):
    """Reads `CHECKPOINT_DECISION` and `STORAGE_PROGRAM`. Marks forward nodes as such, and what runs in backward as that."""

    name = "rematerialize"
    requires = (CHECKPOINT_DECISION, STORAGE_PROGRAM)
    preserves = (CHECKPOINT_DECISION,)

    def run(self, graph_module: fx.GraphModule) -> bool:
        kept, tape = read(CHECKPOINT_DECISION, graph_module), read(STORAGE_PROGRAM, graph_module)
        backward = {run.name for run in tape.runs if run.backward}
        once = {run.name for run in tape.runs if not run.repeatable}
        if missing := kept.names - {node.name for node in graph_module.graph.nodes}:
            raise HpmlError(f"there is no {', '.join(sorted(missing))} to keep", "rematerialize",
                            "what is kept was decided of another graph: this is a mistake in the pass that decides it")
        return _RematerializationRewrite(graph_module.graph, kept.names, backward, once).run()


class _RematerializationRewrite:
    """once: names of calls that cannot run again. copies: of forward nodes in backward."""

    def __init__(self, graph: fx.Graph, kept: frozenset[str], backward: set[str], once: set[str]):
        self.graph, self.kept, self.once = graph, kept, once
        self.copies: dict[fx.Node, fx.Node] = {}
        self.in_backward: set[fx.Node] = set()
        for node in graph.nodes:  # views and parts of what backward computes are backward's, too
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
        return True

    def there(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """What stands for a node in backward: itself, if it is kept, given or backward's own, else a copy before the reader."""
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
        """A number, such as a size, is always kept."""
        if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)):
            return True
        return (node.op != "call_function" or node in self.in_backward or node in self.copies or node.name in self.kept)

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        # What makes no memory, such as a view, is no run of the tape; what is taken of a call with several results is one part.
        if node.name in self.once or not (node.target is WAIT or view_name(node.target) in VIEWS or is_recomputable(node)):
            raise HpmlError(f"{node.name} ({node.target}) cannot be computed once more, and is not kept", "rematerialize",
                            "keep it: this is a mistake in the pass that decides what is kept")
        with self.graph.inserting_before(before):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: self.copies.get(x, x))
            copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name + AGAIN)
        copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
        return copy

