"""Placement of tensors that one rank of an axis owns: the parameters of a pipeline stage, along the pipeline axis.

DTensor has no rules for this placement (it is neither shard, replicate nor partial), so ops that do not handle it fail.
`Shard(0)` with all rows on one rank would work in some places, but is silently taken for even shards in others.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from hpml_compiler.runtime.placements.inner_shard import InnerShard, gathered_inner, inverse, local_shape, memory_order
from passes import compat


class SingleRank(Placement):
    """The rank with this index along the axis has the tensor (as placed by the other axes); other ranks have no rows."""

    rank: int

    def __init__(self, rank: int) -> None:
        super().__init__()  # Placement is a C++ class, so this cannot be a dataclass
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SingleRank) and self.rank == other.rank

    def __hash__(self) -> int:
        return hash((SingleRank, self.rank))

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return SingleRank, (self.rank,)

    def __repr__(self) -> str:
        return f"Owned({self.rank})"

    __str__ = __repr__


def is_owned(placements: Sequence[Placement]) -> bool:
    return any(type(placement) is SingleRank for placement in placements)


def unknown_to_dtensor(placements: Sequence[Placement]) -> bool:
    """True if DTensor has no rules for one of the placements: its results may be wrong, so it must not be used."""
    return any(type(placement) in (SingleRank, InnerShard) for placement in placements)


def owner_of(tensor: object) -> int | None:
    """The rank that owns a tensor along its `SingleRank` axis; None for other tensors."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return next((placement.rank for placement in placements if isinstance(placement, SingleRank)), None)


def as_at_owner(placements: Sequence[Placement]) -> list[Placement]:
    """The placements with Replicate in place of SingleRank, as the owner sees them."""
    return [Replicate() if type(placement) is SingleRank else placement for placement in placements]


def is_owner(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """True if this rank owns the tensor along all `SingleRank` axes."""
    return all(mesh.get_local_rank(axis) == placement.rank for axis, placement in enumerate(placements)
               if isinstance(placement, SingleRank))


def no_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of an owned part on the ranks that do not own it."""
    return (0, *shape[1:])


def from_owner(tensor: DTensor) -> torch.Tensor:
    """Broadcast the owner's part to all ranks, which must call this together."""
    return _brought(tensor._local_tensor, tensor._spec)


def _brought(local: torch.Tensor, spec: Any) -> torch.Tensor:
    mesh, placements = spec.mesh, spec.placements
    shape, _ = compat.local_shape_and_offset(spec.tensor_meta.shape, mesh, as_at_owner(placements))
    shape = local_shape(shape, mesh, placements)
    # Parts have the same dim order in memory as the whole, which all ranks know.
    order = memory_order(spec.tensor_meta.stride)
    owner = is_owner(mesh, placements)
    # The owner copies too, so that in-place writes have the same effect on every rank.
    part = local.new_empty([shape[dim] for dim in order])
    if owner:
        part.copy_(local.detach().permute(order))
    for axis, placement in enumerate(placements):
        if isinstance(placement, SingleRank):
            dist.broadcast(compat.as_transferable(part), group=mesh.get_group(axis), group_src=placement.rank)
    return part.permute(inverse(order))


def at_owner(local: torch.Tensor, spec: Any) -> tuple[torch.Tensor, Any]:
    """A part and its spec without `SingleRank`: an owned part is broadcast to all ranks."""
    if not is_owned(spec.placements):
        return local, spec
    like = torch.empty_strided(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="meta")
    return _brought(local, spec), compat.dtensor_spec(spec.mesh, as_at_owner(spec.placements), like)


def at_other_owner(placements: Sequence[Placement], owner: int) -> tuple[Placement, ...]:
    """The placements of an owned tensor with another owner."""
    return tuple(SingleRank(owner) if type(each) is SingleRank else each for each in placements)


def as_dtensor_knows(local: torch.Tensor, spec: Any) -> tuple[torch.Tensor, Any]:
    """A part and its spec with only DTensor's own placements; all ranks must call this together."""
    return gathered_inner(*at_owner(local, spec))
