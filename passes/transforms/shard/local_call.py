"""Description of one call for `localization`: the local operands, and whole and local sizes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from passes.graph.fx_nodes import BY_COORDINATE
from passes.graph.shard_offset import ShardOffset
from passes.op_rules.base import Rule
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.rank_coordinate import begin_of


class ShardRange(NamedTuple):
    """A rank's range of a split dim."""

    first: int
    count: int
    begins: ShardOffset
    """The start as a function of the rank's mesh coordinates."""

    def marked(self, node: Node) -> Node:
        """Mark a call that has the start among its constants."""
        node.meta[BY_COORDINATE] = self.begins
        return node

    def start_node(self, insert: CallInserter, device: torch.device) -> Node | int:
        """The start, computed when the graph runs."""
        return begin_of(insert, self.begins, device)


@dataclass(frozen=True)
class LocalCall:
    """One call to localize: `args`/`kwargs` are the local operands; shapes are those of the results."""

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    global_shapes: tuple[tuple[int, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    rule: Rule | None
    ranges: Mapping[int, ShardRange]
    """Operand of indices -> this rank's range of them, where the indexed dim is split."""
    ordered: Mapping[int, ShardRange] = field(default_factory=dict)
    """Dim of the first result in which positions are counted -> this rank's range of them, where it is split."""
    at_run_time: bool = False
    """True if the start of a range is computed when the graph runs."""
    strides: tuple[tuple[int, ...], ...] = ()
    """Strides of the whole operands; only ops that address memory rather than dims need them."""

    def ratio(self, dim: int) -> int:
        return self.global_shapes[0][dim] // max(self.local_shapes[0][dim], 1)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)
