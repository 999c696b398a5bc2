"""Bucket gradient reductions and overlap them with backward: one collective for many, waited for at the end.

A collective has a latency that for small gradients is most of its time, and an immediate wait leaves the device
idle. So the reductions of backward are collected into buckets, in the order in which their operands are computed; a bucket
starts when its last operand is ready, and runs while the rest of backward is computed. (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.)

Reductions that something other than a graph output needs are not delayed: they share a bucket only as long
as none of them is needed. Values do not change except for the order in which a backend adds.

Where memory is limited, buckets are smaller, and each is waited for when the next one starts, so that unreduced gradients
are freed early.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.cost_model.base import BUCKET_BYTES
from passes.graph.fx_nodes import COMPRESSION, WAIT, is_collective
from passes.graph.module_blocks import assign_blocks
from passes.op_rules.local_call import reshape
from passes.op_rules.rule_table import is_random, operator_of
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE, REDUCE_SCATTER = c10d.all_reduce.default, c10d.reduce_scatter_tensor.default
PARTS, LEAST_BYTES = 16, 1 << 16
"""Where memory is limited, a bucket is at most this fraction of all gradients, since its buffer is allocated in addition;
or this many bytes, if that is more."""
MAX_LATER = 16
"""Nodes between a reduction and the outputs that may be moved to the end with it."""


@dataclass(frozen=True)
class _GradientReduction:
    start: Node
    wait: Node
    later: tuple[Node, ...] | None
    """The nodes up to the outputs, if nothing else needs them: the reduction can be delayed. None otherwise."""
    needed_at: int
    nbytes: int
    soon: bool = False
    """True if it can be waited for at once, with the nodes that follow."""
    block: str = ""
    """Reductions share a bucket only within one block."""

    def key(self) -> Hashable:
        operand, *how = self.start.args
        return (self.start.target, tuple(how), operand.meta["val"].dtype, self.start.meta.get(COMPRESSION), self.later is None,
                self.soon, self.block)


@register
@dataclass(frozen=True)
class BucketGradients(TransformPass):
    """See the module's docstring. bucket_bytes: size of a full bucket; 0 leaves every reduction by itself, but late. soon: one
    bucket is in flight at a time. by_block: no bucket has reductions of two blocks, so that equal layers stay equal and a
    few can stand for many."""

    name = "bucket_gradients"

    bucket_bytes: int = BUCKET_BYTES
    soon: bool = False
    by_block: bool = False

    def run(self, graph_module: GraphModule) -> bool:
        nodes = list(graph_module.graph.nodes)
        order = {node: k for k, node in enumerate(nodes)}
        blocks = assign_blocks(graph_module) if self.by_block else {}
        reductions = [replace(r, block=blocks.get(r.start, "")) for node in nodes for r in _reduction(node, order)]
        if self.soon:
            reductions = _soon(reductions, order)
        fused: set[Node] = set()
        following = nodes[-1]
        buckets = self._buckets(reductions, order)
        if self.soon:  # the last one first, so that the start of the next one is known
            buckets.sort(key=lambda bucket: -order[bucket[-1].start])
        for bucket in buckets:
            started, place = bucket[-1].start, following if bucket[0].soon else nodes[-1]
            if len(bucket) > 1:
                # Not by `needed_at`: another bucket may have replaced the node there.
                late = bucket[0].later is not None
                needed = place if late else min(user for r in bucket for user in r.wait.users)
                started = _fuse(bucket, needed, fake_mode_of(graph_module))
                fused.update(r.wait for r in bucket)
            if bucket[0].soon:
                _move({n for r in bucket for n in r.later or ()} - fused, place, order)
            following = started
        _move({n for r in reductions for n in r.later or () if not r.soon} - fused, nodes[-1], order)
        return bool(reductions)

    def _buckets(self, reductions: Sequence[_GradientReduction], order: dict[Node, int]) -> list[list[_GradientReduction]]:
        """Buckets in the order of their operands. No member is needed before the last operand of its bucket is ready."""
        full: list[list[_GradientReduction]] = []
        filling: dict[Hashable, list[_GradientReduction]] = {}
        most = self.bucket_bytes
        if self.soon and not self.by_block:  # with folded layers the total size of gradients is unknown
            most = min(most, max(sum(r.nbytes for r in reductions) // PARTS, LEAST_BYTES))
        for r in reductions:
            bucket = filling.setdefault(r.key(), [])
            if bucket and (
                min(b.needed_at for b in bucket) <= order[r.start]
                or sum(b.nbytes for b in bucket) + r.nbytes > most
            ):
                full.append(bucket)
                bucket = filling[r.key()] = []
            bucket.append(r)
        return [*full, *filling.values()]


def _move(nodes: Iterable[Node], place: Node, order: dict[Node, int]) -> None:
    """Move nodes to before `place`, keeping their order."""
    for node in sorted(nodes, key=order.__getitem__):
        place.prepend(node)


def _reduction(node: Node, order: dict[Node, int]) -> list[_GradientReduction]:
    """The reduction of backward that `node` starts, if any."""
    if node.target not in (ALL_REDUCE, REDUCE_SCATTER) or node.meta.get("partitioner_tag") != "is_backward":
        return []
    if len(node.users) != 1:
        return []
    (wait,) = node.users
    later = _only_for_outputs(wait)
    needed_at = min(order[user] for user in wait.users) if later is None else len(order) - 1
    value = node.args[0].meta["val"]
    return [_GradientReduction(node, wait, later, needed_at, value.numel() * value.element_size())]


def _soon(reductions: Sequence[_GradientReduction], order: dict[Node, int]) -> list[_GradientReduction]:
    """Mark reductions whose readers depend on nothing else that is computed after the reduction starts, or late."""
    late: set[Node] = set()
    while True:
        found = [replace(r, soon=r.later is not None and all(
            x in r.later or order[x] <= order[r.start] and x not in late for node in r.later for x in node.all_input_nodes)
            and late.isdisjoint(r.later)) for r in reductions]
        more = {node for r in found if not r.soon for node in r.later or ()}
        if more <= late:
            return found
        late |= more


def _only_for_outputs(wait: Node) -> tuple[Node, ...] | None:
    """`wait` and all its users, if these are few, cheap and lead to outputs only; else None."""
    found = {wait: None}
    stack = [wait]
    while stack:
        for user in stack.pop().users:
            if user.op == "output" or user in found:
                continue
            dear = is_collective(user.target) or operator_of(user.target).heavy or is_random(user.target)
            if dear or len(found) > MAX_LATER:
                return None
            found[user] = None
            stack.append(user)
    return tuple(found)


def _fuse(bucket: Sequence[_GradientReduction], place: Node, fake_mode: Any) -> Node:
    """One collective over the concatenated operands, waited for before `place`; every reduction is a part of its result.
    Returns the node that starts it."""
    last = bucket[-1].start
    insert = CallInserter(last.graph, last, fake_mode=fake_mode)
    rows = [last.args[2], -1] if last.target is REDUCE_SCATTER else [-1]  # a reduce_scatter divides the first dim
    flat = [reshape(insert, r.start.args[0], rows) for r in bucket]
    dim = len(rows) - 1
    started = insert(last.target, insert(aten.cat.default, flat, dim), *last.args[1:])
    if COMPRESSION in last.meta:
        started.meta[COMPRESSION] = last.meta[COMPRESSION]
    insert = CallInserter(last.graph, place, like=last, fake_mode=fake_mode)
    result = insert(WAIT, started)
    offset = 0
    for r, operand in zip(bucket, flat):
        size = operand.meta["val"].shape[dim]
        part = insert(aten.slice.Tensor, result, dim, offset, offset + size)
        r.wait.replace_all_uses_with(reshape(insert, part, r.wait.meta["val"].shape))
        last.graph.erase_node(r.wait)  # torch marks collectives as side effects, so they are never dead code
        offset += size
    for r in bucket:
        last.graph.erase_node(r.start)
    return started
