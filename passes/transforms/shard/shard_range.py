"""A rank's range of a split dim."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from passes.graph.fx_nodes import BY_COORDINATE
from passes.graph.shard_offset import ShardOffset
from passes.op_rules.local_call import Insert
from passes.transforms.shard.rank_coordinate import begin_of


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
