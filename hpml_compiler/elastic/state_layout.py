"""Blocks of a run's state by rank: which of them other ranks hold copies of, and which are missing when ranks are lost."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from hpml_compiler.checkpoints.staged_tensors import own_parts

Part = Literal["sent", "kept"]
PARTS: tuple[Part, ...] = ("sent", "kept")
Key = tuple[str, tuple[int, ...]]


class Block(NamedTuple):
    """A block of a tensor that a rank has. shape: of the whole tensor; offsets and sizes: of the block in it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def key(self) -> Key:
        return self.name, self.offsets

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class RankBlocks:
    """The blocks of one rank. same: name of a tensor -> the name of that which has its memory."""

    blocks: tuple[Block, ...]
    same: dict[str, str]


def blocks_of(tensors: Mapping[str, torch.Tensor]) -> tuple[RankBlocks, dict[Key, torch.Tensor]]:
    """The blocks of these tensors that this rank has, and their values, not copied."""
    own = own_parts(tensors)
    found, values = list[Block](), dict[Key, torch.Tensor]()
    for item in own.items:
        data = item.tensor_data
        assert data is not None, "all are tensors"
        found.append(Block(item.index.fqn, data.properties.dtype, tuple(data.size), tuple(data.chunk.offsets),
                           tuple(data.chunk.sizes)))
        values[found[-1].key] = own.parts[item.index]
    return RankBlocks(tuple(found), own.same), values


class Holding(NamedTuple):
    """Memory of one rank that is left: its own blocks, as rank `rank`, and the sent blocks of the ranks `received`."""

    rank: int
    received: tuple[int, ...]


class StateLayout:
    """Blocks of all ranks. A block that at most `redundancy` ranks have is sent to that many others; all others are kept.

    local_ranks: ranks of one node. Copies go to other nodes first: to the rank of the same number in the next one.
    """

    def __init__(self, ranks: Sequence[RankBlocks], redundancy: int, local_ranks: int) -> None:
        self.ranks, world = list(ranks), len(ranks)
        owners = Counter(key for rank in ranks for key in {block.key for block in rank.blocks})
        self._parts: dict[Part, list[list[Block]]] = {"sent": [], "kept": []}
        for rank in ranks:
            ordered = sorted(rank.blocks, key=lambda block: -block.dtype.itemsize)  # so that each begins at its alignment
            self._parts["sent"].append([block for block in ordered if owners[block.key] <= redundancy])
            self._parts["kept"].append([block for block in ordered if owners[block.key] > redundancy])
        away = sorted(range(1, world), key=lambda offset: (offset % local_ranks != 0, offset))
        self.offsets = away[:redundancy]

    def blocks(self, rank: int, part: Part) -> list[Block]:
        return self._parts[part][rank]

    def bytes(self, rank: int, part: Part) -> int:
        return sum(block.bytes for block in self.blocks(rank, part))

    @property
    def is_sharded(self) -> bool:
        """True if some state would be lost with a rank."""
        return any(self._parts["sent"])

    def holders(self, rank: int) -> list[int]:
        """Ranks that hold a copy of what this rank sends."""
        return [(rank + offset) % len(self.ranks) for offset in self.offsets]

    def held_by(self, rank: int) -> list[int]:
        """Ranks whose sent blocks this rank holds."""
        return [(rank - offset) % len(self.ranks) for offset in self.offsets]

    def sources(self, left: Sequence[Holding | None]) -> tuple[list[tuple[int, int, Part]], list[int]]:
        """Places to take all blocks from: (index in `left`, rank of the layout, part), each with blocks that those before have
        not. Then the ranks of which blocks are missing. left: what each rank that is there now holds."""
        there = [(index, holding) for index, holding in enumerate(left) if holding is not None]
        offered: list[tuple[int, int, Part]] = []
        for index, holding in there:
            offered.extend((index, holding.rank, part) for part in PARTS)
        for index, holding in there:
            for rank in holding.received:
                offered.append((index, rank, "sent"))
        missing = {block.key for rank in self.ranks for block in rank.blocks if block.bytes}
        taken = list[tuple[int, int, Part]]()
        for index, rank, part in offered:
            if (keys := missing & {block.key for block in self.blocks(rank, part)}):
                missing -= keys
                taken.append((index, rank, part))
        lost = [number for number, rank in enumerate(self.ranks) if missing & {block.key for block in rank.blocks}]
        return taken, lost
