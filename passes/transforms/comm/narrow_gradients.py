"""Send gradients in 16 bits: reductions are rewritten to exchanges of rounded addends, summed in the dtype of the gradient.

    all_reduce       cast -> all_to_all -> cast back, sum -> cast -> all_gather -> cast back
    reduce_scatter   cast -> all_to_all -> cast back, sum

The bytes are those of a 16-bit all_reduce (reduce_scatter) over a ring. Only addends and the result are rounded, once each; a
ring would round each partial sum, in an order of its own. Every rank gets the same bits.

The middle of an all_reduce, where the sum is made, stands before the next such reduction starts, or where the result is waited
for: the rest of backward runs meanwhile.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.graph.fx_nodes import COMPRESSION, WAIT
from passes.hardware.gradient_compression import NARROW
from passes.op_rules.local_call import reshape
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

aten, c10d, prims = torch.ops.aten, torch.ops._c10d_functional, torch.ops.prims
ALL_REDUCE, REDUCE_SCATTER = c10d.all_reduce.default, c10d.reduce_scatter_tensor.default


@register
@dataclass(frozen=True)
class NarrowGradients(TransformPass):
    """See the module's docstring. It rewrites the reductions that `Shard` has marked with a compression to 16 bits."""

    name = "narrow_gradients"

    def run(self, graph_module: GraphModule) -> bool:
        marked = [node for node in graph_module.graph.nodes
                  if node.target in (ALL_REDUCE, REDUCE_SCATTER) and NARROW.keys() & {_compression(node)}]
        order = {node: k for k, node in enumerate(graph_module.graph.nodes)}
        for number, start in enumerate(marked):
            (wait,) = start.users
            following = marked[number + 1] if number + 1 < len(marked) else wait
            middle = min(following, wait, key=order.__getitem__)
            _NarrowReduction(start, wait, fake_mode_of(graph_module)).rewrite(middle)
        return bool(marked)


def _compression(node: Node) -> str:
    return node.meta.get(COMPRESSION, ("", 0))[0]


class _NarrowReduction:
    """One reduction, from its start to the wait for it."""

    def __init__(self, start: Node, wait: Node, fake_mode: Any):
        self.start, self.wait, self.fake_mode = start, wait, fake_mode
        compression, self.ranks = start.meta[COMPRESSION]
        self.narrow = getattr(torch, NARROW[compression])
        self.operand, self.group = start.args[0], start.args[-1]
        self.value = self.operand.meta["val"]

    def rewrite(self, middle: Node) -> None:
        """Replace the reduction; the sum of an all_reduce is made before the node `middle`."""
        scatters, insert = self.start.target is REDUCE_SCATTER, self._before(self.start)
        rows = self._rows(insert)
        sent = insert(prims.convert_element_type.default, rows, self.narrow)
        ones = [1] * self.ranks
        exchanged = insert(c10d.all_to_all_single.default, sent, ones, ones, self.group)
        if scatters:
            insert = self._before(self.wait)
            result = reshape(insert, self._sum(insert, exchanged), self.wait.meta["val"].shape)
        else:
            insert = self._before(middle)
            part = insert(prims.convert_element_type.default, self._sum(insert, exchanged), self.narrow)
            gathered = insert(c10d.all_gather_into_tensor.default, part, self.ranks, self.group)
            insert = self._before(self.wait)
            whole = insert(prims.convert_element_type.default, insert(WAIT, gathered), self.value.dtype)
            if whole.meta["val"].numel() != self.value.numel():
                whole = insert(aten.slice.Tensor, whole, 0, 0, self.value.numel())
            result = reshape(insert, whole, self.value.shape)
        self.wait.replace_all_uses_with(result)
        graph = self.start.graph
        graph.erase_node(self.wait)
        graph.erase_node(self.start)

    def _before(self, place: Node) -> CallInserter:
        return CallInserter(self.start.graph, place, like=self.start, fake_mode=self.fake_mode)

    def _rows(self, insert: CallInserter) -> Node:
        """The operand as one row for each rank, padded if it is to be split evenly."""
        size, flat = self.value.numel(), self.operand
        if self.start.target is ALL_REDUCE and size % self.ranks:
            flat = insert(aten.constant_pad_nd.default, reshape(insert, flat, [size]), [0, -size % self.ranks])
        return reshape(insert, flat, [self.ranks, -(-size // self.ranks)])

    def _sum(self, insert: CallInserter, exchanged: Node) -> Node:
        received = insert(prims.convert_element_type.default, insert(WAIT, exchanged), self.value.dtype)
        return insert(aten.sum.dim_IntList, received, [0])
