"""One call of an operator, as `localization` gets it: the local operands, and the sizes that the call has whole and here."""
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
    """A rank's part of a dim that is split."""

    first: int
    count: int
    begins: ShardOffset
    """How the first follows from where the rank is."""

    def marked(self, node: Node) -> Node:
        """A call that has the first among its constants."""
        node.meta[BY_COORDINATE] = self.begins
        return node

    def asked(self, insert: CallInserter, device: torch.device) -> Node | int:
        """The first, asked for when the graph runs."""
        return begin_of(insert, self.begins, device)


@dataclass(frozen=True)
class LocalCall:
    """One call to be localized: `args`/`kwargs` hold the local operands; shapes are those of the results."""

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    whole: tuple[tuple[int, ...], ...]
    local: tuple[tuple[int, ...], ...]
    rule: Rule | None
    ranges: Mapping[int, ShardRange]
    """Operand that holds indices -> this rank's range of them, where the indexed dim is split."""
    ordered: Mapping[int, ShardRange] = field(default_factory=dict)
    """Dim of the first result whose positions count -> this rank's range of them, where it is split."""
    asks: bool = False
    """Whether the first of a range is asked for when the graph runs."""
    strides: tuple[tuple[int, ...], ...] = ()
    """Of the whole operands; only what reads memory rather than dims needs them."""

    def ratio(self, dim: int) -> int:
        return self.whole[0][dim] // max(self.local[0][dim], 1)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)
