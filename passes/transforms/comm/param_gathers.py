"""Gathers of a graph's inputs, by the blocks that read them, and their buckets."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch.fx import GraphModule, Node

from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE, WAIT, is_collective
from passes.graph.module_blocks import assign_blocks, assign_modules
from passes.graph.user_checkpointing import CHECKPOINTED
from passes.op_rules.rule_table import is_random, operator_of

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
LITTLE = 0.1
"""A block that gathers at most this fraction of the next one is merged: it would be too short to hide anything. A
layer is not merged: the rest of it computes, however little it gathers, and the last one equals those before it."""


@dataclass(frozen=True)
class ParamGather:
    """lead: calls between the input and the gather, in order. block: of the first reader; in_layer: whether that is one of
    several equal ones."""

    start: Node
    wait: Node
    lead: tuple[Node, ...]
    block: str
    backward: bool
    nbytes: int
    in_layer: bool = False

    def key(self) -> Hashable:
        """Gathers with equal keys can share a bucket."""
        marks = tuple(self.start.meta.get(key) for key in CHECKPOINTED)
        return self.start.args[1:], self.start.meta["val"].dtype, marks


Block = tuple[ParamGather, ...]


@dataclass(frozen=True)
class GatherBucket:
    """share: fraction of its block that is read before it."""

    share: float
    gathers: list[ParamGather]


def find_gathers(gm: GraphModule) -> list[ParamGather]:
    """All gathers of forward inputs, in the order in which they are read."""
    blocks, modules = assign_blocks(gm), assign_modules(gm)
    found = []
    for wait in gm.graph.find_nodes(op="call_function", target=WAIT):
        start = wait.args[0]
        lead = _lead(start.args[0]) if start.target is ALL_GATHER and len(start.users) == 1 and wait.users else None
        if lead is None:
            continue
        reader = min(wait.users)
        while operator_of(reader.target).view and reader.users:
            reader = min(reader.users)
        value = wait.meta["val"]
        found.append(ParamGather(
            start, wait, lead, blocks.get(reader) or modules.get(reader) or wait.name,
            start.meta.get("partitioner_tag") in (BACKWARD_ON_PURPOSE, "is_backward"), value.numel() * value.element_size(),
            bool(blocks.get(reader))))
    return sorted(found, key=lambda each: each.wait)


def _lead(node: Node) -> tuple[Node, ...] | None:
    """The calls from a forward input to a node, if few and cheap: views, casts, copies. Else None."""
    found: list[Node] = []
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or is_collective(node.target) or operator_of(node.target).heavy or is_random(
                node.target):
            return None
        found.append(node)
        node = node.all_input_nodes[0]
    return tuple(found[::-1]) if node.op == "placeholder" and "tangent" not in str(node.target) else None


def blocks_of(gathers: Sequence[ParamGather]) -> list[Block]:
    """Gathers of one phase, by block; outside of blocks, by module."""
    found = [tuple(each) for _, each in groupby(gathers, key=lambda each: each.block)]
    joined: list[Block] = []
    little: Block = ()
    for block, following in pairwise([*found, ()]):
        block = (*little, *block)
        in_layer = any(each.in_layer for each in block)
        little = block if not in_layer and nbytes_of(block) <= LITTLE * nbytes_of(following) else ()
        if not little:
            joined.append(block)
    return joined


def buckets_of(block: Block, most: int) -> list[GatherBucket]:
    """Buckets in the order of their first reads. most: bytes in a bucket, unless it has one gather."""
    found: list[GatherBucket] = []
    filling: dict[Hashable, GatherBucket] = {}
    read, total = 0, nbytes_of(block) or 1
    for each in block:
        bucket = filling.get(each.key())
        if bucket is None or nbytes_of(bucket.gathers) + each.nbytes > most:
            bucket = filling[each.key()] = GatherBucket(read / total, [])
            found.append(bucket)
        bucket.gathers.append(each)
        read += each.nbytes
    return found


def nbytes_of(gathers: Sequence[ParamGather]) -> int:
    return sum(each.nbytes for each in gathers)
