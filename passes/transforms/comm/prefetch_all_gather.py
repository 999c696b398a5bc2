"""Bucket and prefetch all-gathers of parameters: the next block's are in flight while one block computes.

A collective has a latency that for small parameters is most of its time, and an immediate wait leaves the device idle. So
the parameters of one block are gathered in few collectives, as its gradients are reduced
(`passes.transforms.comm.gradient_buckets`), and these start while the previous block computes, in forward as in backward: like
in the simulator (`passes.simulation.rank_program`), never more than one block ahead, so that at most two blocks are
unsharded at once. The wait is at the first read. (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3.2.)

Autograd's operations on parameters for backward, such as transposes, are traced in forward. Calls held back
for backward are moved to their first reader: otherwise all parameters that backward gathers would be unsharded from its start.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.cost_model.base import BUCKET_BYTES
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE, WAIT
from passes.registry import register
from passes.transforms.comm.param_gathers import ALL_GATHER, Block, ParamGather, blocks_of, buckets_of, find_gathers, nbytes_of
from passes.transforms.rewriting.call_inserter import CallInserter

TOGETHER = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default


@register
@dataclass(frozen=True)
class PrefetchAllGather(TransformPass):
    """See the module's docstring. bucket_bytes: upper limit of a bucket; 0 leaves every gather by itself. ahead:
    if False, each is by itself and starts where it is waited for, which takes the least memory."""

    name = "prefetch_all_gather"

    bucket_bytes: int = BUCKET_BYTES
    ahead: bool = True

    def run(self, graph_module: GraphModule) -> bool:
        changed = _to_first_reader(graph_module.graph)
        gathers = find_gathers(graph_module) if self.ahead else []
        if not gathers:
            return changed
        moves = _NodeMoves(graph_module)
        for backward in (False, True):
            begin = _begin(graph_module.graph, backward)
            before: Block = ()
            for block in blocks_of([each for each in gathers if each.backward == backward]):
                for bucket in buckets_of(block, self.bucket_bytes):
                    moves.start(bucket.gathers, begin, _anchor(before, bucket.share))
                before = block
        moves.make()
        return True


def starts_ahead(graph: Graph) -> bool:
    """True if some gather is not waited for at once."""
    return any(node.target is TOGETHER or (node.target is ALL_GATHER and node.next.target is not WAIT) for node in graph.nodes)


def _to_first_reader(graph: Graph) -> bool:
    """Move calls held back for backward to their first reader."""
    changed = False
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.users and node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE:
            first = min(node.users)
            if node.next is not first:
                first.prepend(node)
                changed = True
    return changed


def _begin(graph: Graph, backward: bool) -> Node | None:
    """The node after which a phase may start to gather."""
    given = graph.find_nodes(op="placeholder")
    if not backward:
        return given[-1]
    readers = [user for node in given if "tangent" in str(node.target) for user in node.users if user.op == "call_function"]
    return min(readers, default=None)


def _anchor(before: Block, share: float) -> Node | None:
    """The wait in the previous block at which an equal share of it is read. So at most one block is in flight."""
    read, total = 0, nbytes_of(before) or 1
    for each in before:
        if read / total >= share:
            return each.wait
        read += each.nbytes
    return before[-1].wait if before else None


class _NodeMoves:
    """Pending moves of nodes: after or before a node that stays, in the order of registration."""

    def __init__(self, gm: GraphModule):
        self.graph, self.fake_mode = gm.graph, fake_mode_of(gm)
        self.order = {node: k for k, node in enumerate(gm.graph.nodes)}
        self.after: dict[Node, list[Node]] = defaultdict(list)
        self.before: dict[Node, list[Node]] = defaultdict(list)
        self.moved: set[Node] = set()

    def start(self, bucket: list[ParamGather], *not_before: Node | None) -> None:
        """Emit one collective for a bucket, after the later one of these nodes, or, if that is too late, at
        its first wait."""
        first = bucket[0].wait
        anchor = max((node for node in not_before if node is not None), key=self.order.__getitem__, default=first)
        place, since = self.after[anchor], anchor
        if self.order[anchor] >= self.order[first]:
            place, since = self.before[first], first
        lead = {node for each in bucket for node in each.lead if self.order[node] > self.order[since]} - self.moved
        place += sorted(lead, key=self.order.__getitem__)
        started = [bucket[0].start] if len(bucket) == 1 else self._together(bucket)
        place += started
        self.moved.update(lead, started)

    def _together(self, bucket: list[ParamGather]) -> list[Node]:
        """One coalesced call in place of several, and its parts. All are waited for when the first is: until then, and no
        longer, the collective itself references all of its results."""
        like = bucket[0].start
        insert = CallInserter(self.graph, like, fake_mode=self.fake_mode)
        found = [insert(TOGETHER, [each.start.args[0] for each in bucket], *like.args[1:])]
        for k, each in enumerate(bucket):
            found.append(insert(operator.getitem, found[0], k))
            each.wait.replace_input_with(each.start, found[-1])
        for each in bucket:
            self.graph.erase_node(each.start)
        waits = [each.wait for each in bucket[1:]]
        self.after[bucket[0].wait] += waits
        self.moved.update(waits)
        return found

    def make(self) -> None:
        """Apply the new order of nodes."""
        output = self.graph.output_node()
        for node in list(self.graph.nodes)[:-1]:
            for each in (*self.before[node], *([] if node in self.moved else [node]), *self.after[node]):
                output.prepend(each)
