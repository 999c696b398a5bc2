"""Insert calls into an FX graph with their fake value and the provenance of the node they stand for."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportReturnType=false
# pyright: reportOptionalOperand=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.fx import Graph, Node, map_arg

from passes.graph.user_checkpointing import CHECKPOINTED
from passes.transforms.rewriting.fake_results import FakeResults

PROVENANCE = (
    "nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "source_fn_stack", "original_aten", "from_node", "custom",
    *CHECKPOINTED,
)


class CallInserter:
    """Inserts calls before one node, with the provenance of that node (or of another). fakes: cache of fake results, where no
    torch mode is active; None: results are computed in `fake_mode`."""

    def __init__(self, graph: Graph, before: Node, like: Node | None = None, fake_mode: Any = None,
                 fakes: FakeResults | None = None):
        self.graph, self.before, self.like, self.fake_mode, self.fakes = graph, before, like or before, fake_mode, fakes

    def __call__(self, target: Callable, /, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        for key in PROVENANCE:
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        args, kwargs = map_arg((args, kwargs), lambda x: x.meta["val"])
        if self.fakes is not None:
            node.meta["val"] = self.fakes(target, args, kwargs)
        else:
            with self.fake_mode or nullcontext():
                node.meta["val"] = target(*args, **kwargs)
        return node
