"""Reduce gradients of matrices by PowerSGD: two thin matrices are summed in place of the gradient.

The operators are in `passes.transforms.comm.low_rank_ops`. Each matrix starts where its gradient is ready; the middle and the
end of all are at the end of the graph, so that `BucketGradients` sums the thin matrices of many together.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.graph.fx_nodes import COMPRESSION, GRADIENT_OF, WAIT
from passes.hardware.gradient_compression import rank_of
from passes.registry import register
from passes.transforms.comm.low_rank_ops import END, MIDDLE, START
from passes.transforms.rewriting.call_inserter import CallInserter

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


@register
@dataclass(frozen=True)
class LowRankGradients(TransformPass):
    """See the module's docstring. It rewrites the reductions that `Shard` has marked with "powersgd:RANK"."""

    name = "low_rank_gradients"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        marked = [node for node in graph.nodes if node.target is ALL_REDUCE and rank_of(_mark(node)[0])]
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        last, fake_mode = graph.output_node(), fake_mode_of(graph_module)
        later = {node for start in marked for node in _after(start)}
        for node in [node for node in graph.nodes if node in later]:
            last.prepend(node)
        waits = {user for start in marked for user in start.users}
        place = next((node for node in graph.nodes if node in later - waits), last)
        middles = []
        for start in marked:
            (compression, ranks), parameter = _mark(start), inputs[start.meta[GRADIENT_OF]]
            insert = CallInserter(graph, start, fake_mode=fake_mode)
            begun = insert(START, start.args[0], parameter, rank_of(compression), ranks)
            total = insert(operator.getitem, begun, 1)
            left = insert(ALL_REDUCE, insert(operator.getitem, begun, 0), "sum", start.args[-1])
            middles.append((start, left, total, parameter, ranks))
        ends = []
        for start, left, total, parameter, ranks in middles:
            insert = CallInserter(graph, place, like=start, fake_mode=fake_mode)
            half = insert(MIDDLE, insert(WAIT, left), total)
            right = insert(ALL_REDUCE, insert(operator.getitem, half, 1), "sum", start.args[-1])
            ends.append((start, insert(operator.getitem, half, 0), right, total, parameter, ranks))
        for start, left, right, total, parameter, ranks in ends:
            insert = CallInserter(graph, place, like=start, fake_mode=fake_mode)
            (wait,) = start.users
            wait.replace_all_uses_with(insert(END, left, insert(WAIT, right), total, parameter, ranks, start.args[-1]))
            graph.erase_node(wait)
            graph.erase_node(start)
        return bool(marked)


def _mark(node: Node) -> tuple[str, int]:
    return node.meta.get(COMPRESSION, ("", 0))


def _after(start: Node) -> set[Node]:
    """All nodes that depend on a reduction, but for the output."""
    found: set[Node] = set()
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                stack.append(user)
    return found
