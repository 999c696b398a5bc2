"""Offload activations chosen by the checkpointing decision: copy them out in forward, and back in backward.

The copy out starts as soon as a value is computed, and is waited for after its last read in forward; the copy back is at its
first read in backward (`passes.transforms.memory.offload_ops`). A one-byte handle is saved in place of the value.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.annotations import read
from passes.base import TransformPass
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION
from passes.compat import fake_mode_of
from passes.errors import HpmlError
from passes.graph.fx_nodes import memory_of
from passes.registry import register
from passes.transforms.memory.offload_ops import FETCH_START, FETCH_WAIT, OFFLOAD_START, OFFLOAD_WAIT
from passes.transforms.rewriting.call_inserter import CallInserter


@register
@dataclass(frozen=True)
class OffloadActivations(TransformPass):
    """Reads `CHECKPOINT_DECISION`, on a graph whose nodes are tagged forward or backward. folder: for the files of a
    CPU."""

    name = "offload_activations"
    requires = (CHECKPOINT_DECISION,)

    folder: str = ""

    def run(self, graph_module: fx.GraphModule) -> bool:
        names = read(CHECKPOINT_DECISION, graph_module).offloaded
        found = [node for node in graph_module.graph.nodes if node.name in names]
        if missing := names - {node.name for node in found}:
            raise HpmlError(f"there is no {', '.join(sorted(missing))} to offload", "offload",
                            "this is a bug in the checkpointing pass")
        rewrite = _OffloadRewrite(graph_module, self.folder)
        for node in found:
            rewrite.offload(node)
        return bool(found)


class _OffloadRewrite:
    def __init__(self, gm: fx.GraphModule, folder: str):
        self.graph, self.folder, self.fake_mode = gm.graph, folder, fake_mode_of(gm)
        self.place = {node: k for k, node in enumerate(gm.graph.nodes)}
        self.last_read: dict[int, fx.Node] = {}  # in forward, by storage
        for node in gm.graph.nodes:
            if node.op == "call_function" and not _in_backward(node):
                self.last_read.update((memory, node) for x in node.all_input_nodes if (memory := memory_of(x)) is not None)

    def offload(self, node: fx.Node) -> None:
        value = node.meta["val"]
        readers = sorted((x for x in node.users if _in_backward(x)), key=self.place.__getitem__)
        if not readers:
            return  # values to be recomputed from it are saved, too
        last = self.last_read.get(memory_of(node), node)
        start = self._before(node.next, node)(OFFLOAD_START, node, list(value.stride()), self.folder)
        after = start if last is node else last
        if self.place[last] > self.place[readers[0]]:  # forward and backward nodes may be interleaved
            after = readers[0].prev
        handle = self._before(after.next, node)(OFFLOAD_WAIT, start, node)
        insert = self._before(readers[0], readers[0])
        fetched = insert(FETCH_START, handle, list(value.shape), list(value.stride()), value.dtype, value.device)
        fetched = insert(FETCH_WAIT, fetched)
        for reader in readers:
            reader.replace_input_with(node, fetched)

    def _before(self, node: fx.Node, like: fx.Node) -> CallInserter:
        return CallInserter(self.graph, node, like, self.fake_mode)


def _in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"
