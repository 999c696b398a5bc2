"""Restore the latest state that ranks have in memory: whole on one of them, or put together from their blocks and copies."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.elastic.kept_state import HeldState, KeptState, StepState, sent_from
from hpml_compiler.elastic.state_copies import StateCopies, StateCopy
from hpml_compiler.elastic.state_layout import Holding, StateLayout
from hpml_compiler.runtime.process.world_group import control_group, from_all_ranks, this_rank

Version = tuple[int, int]
"""Steps that are done, and the generation of the ranks that had done them."""


@dataclass(frozen=True)
class Offer:
    """State that a rank has. whole: steps that are done, and its own state, where it has all of it. parts: by version, what it
    holds of the copies, and its own state."""

    whole: tuple[int, dict[str, Any]] | None
    parts: dict[Version, tuple[Holding, dict[str, Any]]]


class Restoration:
    """One restoration, which all ranks that are there make together. kept: None where this rank has not all of the state."""

    def __init__(self, kept: KeptState | None, copies: Iterable[StateCopies]) -> None:
        self._kept = kept
        self._copies: dict[Version, StateCopy] = {
            (copy.step.done, each.generation): copy for each in copies for copy in each.left() if copy.step is not None}
        parts = {version: (each.holding(), each.step.own) for version, each in self._copies.items() if each.step is not None}
        self._offers = from_all_ranks(Offer(None if kept is None else (kept.done, kept.step.own), parts))
        found = from_all_ranks({version: self._lost(version) for version in self._copies})
        self._lost_by: dict[Version, list[int]] = {version: lost for each in found for version, lost in each.items()}

    def _lost(self, version: Version) -> list[int]:
        """Ranks of a version of which no rank has all blocks."""
        return self._copies[version].layout.sources(self._holdings(version))[1]

    def _holdings(self, version: Version) -> list[Holding | None]:
        return [offer.parts[version][0] if version in offer.parts else None for offer in self._offers]

    def found(self) -> HeldState | None:
        """The latest state that is there, on all ranks; None if there is none."""
        whole = max((offer.whole[0] for offer in self._offers if offer.whole is not None), default=-1)
        version = max((each for each, lost in self._lost_by.items() if not lost), default=(-1, 0))
        if max(whole, version[0]) < 0:
            return None
        return self._whole(whole) if whole >= version[0] else self._put_together(version)

    def reason(self) -> str:
        """The reason why copies do not make up the state; "" if there are none."""
        if not self._lost_by:
            return ""
        lost = self._lost_by[max(self._lost_by)]
        return f"rank {lost[0]} is lost with the copies of its state" if len(lost) == 1 else (
            f"ranks {', '.join(map(str, lost))} are lost with the copies of their state")

    def _own_states(self, known: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Own states of the ranks; those without the state take that of the first that has it."""
        first = known[min(known)]
        return [known.get(rank, first) for rank in range(len(self._offers))]

    def _whole(self, done: int) -> HeldState:
        known = {rank: offer.whole[1] for rank, offer in enumerate(self._offers)
                 if offer.whole is not None and offer.whole[0] == done}
        held = self._kept.held(self._own_states(known)) if self._kept is not None and self._kept.done == done else None
        return held if held is not None and len(known) == len(self._offers) else sent_from(min(known), held)

    def _put_together(self, version: Version) -> HeldState:
        known = {rank: offer.parts[version][1] for rank, offer in enumerate(self._offers) if version in offer.parts}
        copy, source, group = self._copies.get(version), min(known), control_group()
        message: list[Any] = [None]
        if copy is not None and this_rank() == source:
            message = [(copy.layout, copy.step)]
        dist.broadcast_object_list(message, source, group)
        layout, step = message[0]
        tensors = _tensors(layout, self._holdings(version), copy, group)
        assert isinstance(step, StepState)
        return step.held(tensors, self._own_states(known))


def _tensors(layout: StateLayout, holdings: Sequence[Holding | None], copy: StateCopy | None,
             group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Whole tensors by name, on all ranks."""
    found = dict[str, torch.Tensor]()
    for rank in layout.ranks:
        for block in rank.blocks:
            if block.name not in found:
                found[block.name] = torch.empty(block.shape, dtype=block.dtype)
    there = set()
    for holder, rank, part in layout.sources(holdings)[0]:
        buffer = torch.empty(layout.bytes(rank, part), dtype=torch.uint8)
        if holder == this_rank():
            assert copy is not None
            buffer = copy.own[part] if rank == copy.rank else copy.received[rank]
        dist.broadcast(buffer, holder, group)
        start = 0
        for block in layout.blocks(rank, part):
            if block.bytes and block.key not in there:
                there.add(block.key)
                place = tuple(slice(offset, offset + size) for offset, size in zip(block.offsets, block.sizes, strict=True))
                found[block.name][place] = buffer[start:start + block.bytes].view(block.dtype).view(block.sizes)
            start += block.bytes
    same = {name: other for rank in layout.ranks for name, other in rank.same.items()}
    return {**found, **{name: found[other] for name, other in same.items() if other in found}}
