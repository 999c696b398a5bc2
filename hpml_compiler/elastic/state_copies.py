"""Copies of sharded state in the memory of other ranks (`redundancy`), from which ranks that are left put all of it together.

After each step, a rank packs its blocks into a buffer of its own, and sends those that no other rank has to its holders, while
the next step runs. Two copies are kept, that of a step until all ranks have received that of the next one: so there is at any
time a step of which every rank has all that it should.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.elastic.kept_state import KeptState, StepState
from hpml_compiler.elastic.state_layout import PARTS, Block, Holding, Key, Part, StateLayout, blocks_of
from hpml_compiler.runtime.process.world_group import copies_group, from_all_ranks, this_rank, world_size
from passes import compat

LEFT_S = 0.5  # for what is in flight when a rank is lost: a loopback connection delivers it in less


@dataclass
class StateCopy:
    """The state after one step. buffers: of this rank's own blocks by part, and of other ranks' by rank, as bytes."""

    layout: StateLayout
    own: dict[Part, torch.Tensor]
    received: dict[int, torch.Tensor]
    step: StepState | None = None
    sends: list[Any] = field(default_factory=list)
    receives: dict[int, Any] = field(default_factory=dict)
    rank: int = field(default_factory=this_rank)

    @staticmethod
    def empty(layout: StateLayout) -> StateCopy:
        rank = this_rank()
        own: dict[Part, torch.Tensor] = {part: _buffer(layout.bytes(rank, part)) for part in PARTS}
        return StateCopy(layout, own, {each: _buffer(layout.bytes(each, "sent")) for each in layout.held_by(rank)})

    def begin(self, step: StepState, values: dict[Part, list[torch.Tensor]]) -> None:
        """Pack this rank's blocks, and begin to send and receive."""
        group, rank = copies_group(), this_rank()
        with compat.plain_torch_functions(), torch.no_grad():
            for part, buffer in self.own.items():
                if buffer.numel():
                    torch.cat([value if value.dtype is torch.uint8 else _bytes_of(value) for value in values[part]], out=buffer)
        self.step = step
        self.sends = [dist.isend(self.own["sent"], group=group, group_dst=each) for each in self.layout.holders(rank)
                      if self.own["sent"].numel()]
        self.receives = {each: dist.irecv(buffer, group=group, group_src=each) for each, buffer in self.received.items()
                         if buffer.numel()}

    def finish(self) -> None:
        """Wait until all is sent and received. Raises torch's error if a rank is gone."""
        for work in (*self.receives.values(), *self.sends):
            work.wait()
        self.sends, self.receives = [], {}

    def settle(self) -> None:
        """Find out what has arrived, some ranks being gone: the rest never will. To be called before the groups are left."""
        for rank, work in self.receives.items():
            try:
                work.wait(timedelta(seconds=LEFT_S))
            except RuntimeError:
                del self.received[rank]
        self.sends, self.receives = [], {}

    def holding(self) -> Holding:
        return Holding(self.rank, tuple(self.received))


class StateCopies:
    """The copies of one generation of ranks. redundancy: number of other ranks that hold a copy."""

    def __init__(self, generation: int, redundancy: int, local_ranks: int) -> None:
        self.generation, self._local_ranks = generation, local_ranks
        self._redundancy = min(redundancy, world_size() - 1)
        self._of: list[Any] = []
        self._optimizers: list[dict[str, Any]] | None = None
        self._layout: StateLayout | None = None
        self._values: dict[Part, list[torch.Tensor]] = {}
        self._whole: StateCopy | None = None
        self._flying: StateCopy | None = None

    def copy(self, kept: KeptState) -> None:
        """Copy the state after a step. All ranks call it. Waits for the copies of the step before."""
        if self._flying is not None:
            self._flying.finish()
        changed = torch.tensor([int(self._layout is None or self._of != kept.identity)])
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=copies_group())  # all are here, so all have received those of before
        spare, self._whole, self._flying = self._whole, self._flying or self._whole, None
        if changed:
            self._lay_out(kept)
        elif kept.has_numbers:
            kept.named()
        self._optimizers = kept.step.optimizers = kept.step.optimizers or self._optimizers
        assert self._layout is not None
        if not self._layout.is_sharded:
            self._whole = None
            return
        if spare is None or spare is self._whole or spare.layout is not self._layout:
            spare = StateCopy.empty(self._layout)
        spare.begin(kept.step, self._values)
        self._flying = spare

    def _lay_out(self, kept: KeptState) -> None:
        mine, values = blocks_of(kept.named())
        self._layout = StateLayout(from_all_ranks(mine), self._redundancy, self._local_ranks)
        self._of = kept.identity
        self._values = {part: _values_of(self._layout.blocks(this_rank(), part), values) for part in PARTS}

    def settle(self) -> None:
        """Give up what is in flight, some ranks being gone, and the tensors that were copied."""
        self._of, self._values = [], {}
        for each in self.left():
            each.settle()

    @property
    def is_complete(self) -> bool:
        """True if all ranks have all that they should of the state after some step."""
        return self._whole is not None

    def left(self) -> list[StateCopy]:
        """The copies that this rank holds."""
        return [each for each in (self._whole, self._flying) if each is not None and each.step is not None]


def _values_of(blocks: Sequence[Block], values: dict[Key, torch.Tensor]) -> list[torch.Tensor]:
    """Values of these blocks: as bytes, in place, where they are contiguous."""
    with compat.plain_torch_functions(), torch.no_grad():
        found = [values[block.key] for block in blocks]
        return [_bytes_of(value) if value.is_contiguous() else value for value in found]


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def _buffer(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)
