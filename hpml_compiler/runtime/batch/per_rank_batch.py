"""Global batches from per-rank rows, as under DDP: the concatenation in order of ranks."""
from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.batch.batch_pytree import map_named_tensors, named_tensors
from hpml_compiler.runtime.batch.batch_shard import batch_of_all_ranks, shard_batch
from hpml_compiler.runtime.process.world_group import control_group, from_all_ranks, world_mesh
from hpml_compiler.runtime.watchdog.activity_scope import activity
from passes.errors import BadInput

log = logging.getLogger(__name__)
Padding = Mapping[str, float] | None


class Ended:
    """Sentinel that a rank passes in place of a batch when its loader is exhausted."""


@dataclass(frozen=True)
class _Described:
    """Metadata of one tensor of a rank's batch, exchanged between ranks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    plain: bool  # contiguous

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> _Described:
        return _Described(name, tensor.dtype, tuple(tensor.shape), tensor.is_contiguous())


class PerRankBatches:
    """Joins the ranks' batches to global batches; all ranks must call `join` equally often.

    pad: name of a tensor -> fill value at the end of its dims, where ranks padded to different lengths.
    """

    def __init__(self, pad: Padding = None) -> None:
        self.pad = dict(pad or {})
        self.last: Any = None
        self.devices: dict[str, torch.device] = {}
        self.warned = False

    def join(self, batch: Any) -> Any:
        """The global batch, or `Ended` once no rank has rows any more.

        Its tensors are `BatchShard`s of this rank's own rows: nothing is copied between ranks. Where the ranks have different
        numbers of rows, or some have ended, rows are exchanged and split evenly, if the ranks divide their total. Raises
        BadInput on all ranks where the batches' names, dtypes or shapes are incompatible.
        """
        ended = batch is Ended
        tensors = {} if ended else {name: _bare(name, t) for name, t in named_tensors(batch).items() if _has_rows(t)}
        if not ended:
            self.last, self.devices = batch, {name: tensor.device for name, tensor in tensors.items()}
        mine = [_Described.of(name, tensor) for name, tensor in tensors.items()]
        if not _all_alike(ended, mine):
            found = _exchanged(None if ended else mine)
            if all(other is None for other in found):
                return Ended
            tensors = self._fitted(tensors, found)
            if len({_count(other) for other in found}) > 1:
                return self._shared_out(tensors)
        elif ended:
            return Ended
        _check_one_count(mine)
        mesh = world_mesh()
        return self._put({name: batch_of_all_ranks(tensor, mesh) for name, tensor in tensors.items()})

    def _put(self, new: Mapping[str, torch.Tensor]) -> Any:
        return map_named_tensors(lambda name, tensor: new.get(name, tensor), self.last)

    def _fitted(self, tensors: dict[str, torch.Tensor], found: list[list[_Described] | None]) -> dict[str, torch.Tensor]:
        """The tensors of this rank, padded where `pad` says so; raises BadInput if the ranks' batches are incompatible."""
        first = next(rank for rank, other in enumerate(found) if other is not None)
        reference = found[first] or []
        for rank, other in enumerate(found):
            for theirs in other or ():
                if (theirs.name, theirs.dtype) not in {(r.name, r.dtype) for r in reference}:
                    raise _misfit(f"`{theirs.name}` ({theirs.dtype}) on rank {rank} is not in the batch of rank {first}")
            if other is not None and len(other) != len(reference):
                raise _misfit(f"rank {rank} has {len(other)} tensors in its batch, rank {first} {len(reference)}")
            if other is not None:
                _check_one_count(other)
        for described in reference:
            shapes = {rank: next(o.shape for o in other if o.name == described.name)
                      for rank, other in enumerate(found) if other is not None}
            rest = {shape[1:] for shape in shapes.values()}
            if len(rest) == 1:
                continue
            if described.name not in self.pad or len({len(shape) for shape in rest}) > 1:
                told = ", ".join(f"{list(shape)} on rank {rank}" for rank, shape in list(shapes.items())[:4])
                raise BadInput(
                    f"rows of a batch have different sizes on different ranks: `{described.name}` is {told}",
                    "hpml_compiler.distribute",
                    "pad to one length in the collate function, or use distribute(loader, rows='own', "
                    f"pad={{{described.name!r}: VALUE}}) with a VALUE that the model and the loss ignore")
            if described.name in tensors:
                largest = [max(sizes) for sizes in zip(*rest)]
                tensors[described.name] = _padded(tensors[described.name], largest, self.pad[described.name])
        return tensors

    def _shared_out(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Gather all ranks' rows on every rank, and take this rank's share if their number is divisible by the ranks."""
        mine = None if self.last is None else {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        parts = _exchanged(mine)
        if None in parts:  # that rank has seen no batch, so it does not know the structure
            raise BadInput(f"rank {parts.index(None)} has no batch, but other ranks do", "hpml_compiler.distribute",
                           "give each rank at least one batch")
        parts = [part for part in parts if part]
        mesh, result = world_mesh(), {}
        for name in parts[0]:
            joined = torch.cat([part[name] for part in parts]).to(self.devices.get(name, "cpu"))
            rows = joined.shape[0]
            result[name] = joined if rows % mesh.size() else shard_batch(joined, mesh)
            if rows % mesh.size() and not self.warned and not dist.get_rank():
                self.warned = True
                log.warning("a batch has %d rows in total, which %d ranks do not divide, so it is replicated; use "
                            "drop_last=True, or a batch size that divides the data", rows, mesh.size())
        return self._put(result)


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and not isinstance(tensor, DTensor)


def _bare(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        raise BadInput(f"`{name}` requires a gradient, but gradients do not flow through batches", "hpml_compiler.distribute",
                       "pass the batch before anything is computed from it")
    return tensor


def _count(described: list[_Described] | None) -> int:
    return described[0].shape[0] if described else 0


def _check_one_count(described: list[_Described]) -> None:
    for other in described:
        if other.shape[0] != _count(described):
            raise BadInput(
                f"`{described[0].name}` has {_count(described)} rows but `{other.name}` {other.shape[0]}, in one batch with "
                "rows='own'", "hpml_compiler.distribute",
                "pass tensors with one row per sample, and remove tensors that are the same on all ranks from the batch")


def _misfit(what: str) -> BadInput:
    return BadInput(f"batches have different structures on different ranks: {what}", "hpml_compiler.distribute",
                    "make the loaders of all ranks return batches of the same structure")


def _padded(tensor: torch.Tensor, sizes: list[int], value: float) -> torch.Tensor:
    result = tensor.new_full((tensor.shape[0], *sizes), value)
    result[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return result


def _all_alike(ended: bool, mine: list[_Described]) -> bool:
    """True if all ranks' batches have the same metadata, or all have ended: one small collective on the host."""
    checksum = zlib.crc32(repr((ended, mine)).encode())
    own = torch.tensor([checksum, -checksum])
    with activity("waiting for the other ranks' rows"):
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=control_group())
    return int(own[0]) == -int(own[1])


def _exchanged(mine: Any) -> list[Any]:
    with activity("exchanging rows with the other ranks"):
        return from_all_ranks(mine)
