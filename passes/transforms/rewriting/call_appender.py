"""Append calls to a graph under construction, each standing for a call of the graph that it is made from."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE
from passes.graph.user_checkpointing import copy_checkpoint_marks
from passes.pass_result import attribute_of
from passes.transforms.rewriting.call_inserter import PROVENANCE, CallInserter
from passes.transforms.rewriting.fake_results import FakeResults


class CallAppender(CallInserter):
    """Appends to the graph under construction instead of inserting before a node. marked: the node whose checkpointing marks
    are copied."""

    def __init__(self, graph: Graph, like: Node, fakes: FakeResults, tag: str | None = None):
        super().__init__(graph, like, like)
        self.fakes = fakes
        self.tag = tag
        self.marked: Node | None = like

    def _value(self, x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        return x.meta["val"] if "val" in x.meta else attribute_of(self.like.graph.owning_module, x)  # a subgraph

    def __call__(self, target, /, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        for key in PROVENANCE:
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        copy_checkpoint_marks(self.marked, node)
        if self.tag is not None:
            node.meta["partitioner_tag"] = self.tag
        if node.meta.get("partitioner_tag") != "is_backward" and any(
            n.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE for n in node.all_input_nodes
        ):
            node.meta["partitioner_tag"] = BACKWARD_ON_PURPOSE  # its readers cannot run before it
        node.meta["val"] = self.fakes(target, *map_aggregate((args, kwargs), self._value))
        return node
