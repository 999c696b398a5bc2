"""A rank's range of a split dim."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from passes.graph.fx_nodes import BY_COORDINATE
from passes.graph.layouts import Layout, is_unequal
from passes.graph.placement_graph import Value
from passes.graph.shard_offset import ShardOffset
from passes.hardware.axis import AxisKind
from passes.op_rules.local_call import Insert
from passes.transforms.shard.rank_coordinate import begin_of
from passes.transforms.shard.redistributor import MeshGroups


class ShardRange(NamedTuple):
    """A `LocalRange` of a mesh."""

    first: int
    count: int
    begins: ShardOffset
    """The start as a function of the rank's mesh coordinates."""

    def marked(self, node: Node) -> Node:
        """Mark a call that has the start among its constants."""
        node.meta[BY_COORDINATE] = self.begins
        return node

    def asked(self, insert: Insert, device: torch.device) -> Node | int:
        """The start, computed when the graph runs."""
        return begin_of(insert, self.begins, device)


def range_of(value: Value, layout: Layout, dim: int, groups: MeshGroups) -> ShardRange | None:
    """This rank's range of a dim; None where the dim is not split."""
    if any(is_unequal(value, p, axis) and isinstance(p, tuple) and p[0] == dim for p, axis in zip(layout, groups.axes)):
        return _unequal_range(value, layout, dim, groups)
    parts, strides = 1, []
    for p, axis, name in reversed([*zip(layout, groups.axes, groups.names, strict=True)]):
        if isinstance(p, tuple) and p[0] == dim:
            if axis.kind is not AxisKind.TIME:  # along which every rank starts at 0
                strides.append((name, parts))
            parts *= axis.size
    if parts == 1:
        return None
    offset = ShardOffset(value.spec.shape[dim] // parts, tuple(reversed(strides)))
    return ShardRange(offset.at(groups.coordinate_of), offset.count, offset)


def _unequal_range(value: Value, layout: Layout, dim: int, groups: MeshGroups) -> ShardRange:
    """This rank's range of a dim whose shards have different sizes."""
    start, size = 0, value.spec.shape[dim]
    for p, axis, mine in zip(layout, groups.axes, groups.coordinates):
        if isinstance(p, tuple) and p[0] == dim:
            parts = axis.parts(size, p in value.batch)
            start, size = start + sum(parts[:mine]), parts[mine]
    return ShardRange(start, size, ShardOffset(size, (), start))
