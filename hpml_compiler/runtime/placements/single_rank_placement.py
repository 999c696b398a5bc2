"""What one rank of an axis has alone: the parameters of a stage, along the axis of the stages.

DTensor knows nothing of this placement: it is neither sharded, nor replicated, nor partial there, so whatever was not taught
it fails. `Shard(0)` with all rows on one rank, which would fit in some places, is taken for even parts in others, silently.
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
    """Along an axis, the rank with this number has all that the other axes leave of a tensor, and the others have no rows."""

    rank: int

    def __init__(self, rank: int) -> None:
        super().__init__()  # Placement is an object of C++, which no dataclass makes
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
    """True if there is one that DTensor has no rules for: it may answer wrongly, and must not be asked."""
    return any(type(placement) in (SingleRank, InnerShard) for placement in placements)


def owner_of(tensor: object) -> int | None:
    """The rank that has a tensor alone along some axis; None where it is no such tensor."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return next((placement.rank for placement in placements if isinstance(placement, SingleRank)), None)


def as_at_owner(placements: Sequence[Placement]) -> list[Placement]:
    """As they are for whoever owns the tensor."""
    return [Replicate() if type(placement) is SingleRank else placement for placement in placements]


def is_owner(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether this rank has its part, as far as owners go."""
    return all(mesh.get_local_rank(axis) == placement.rank for axis, placement in enumerate(placements)
               if isinstance(placement, SingleRank))


def no_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of what others have of an owned part."""
    return (0, *shape[1:])


def from_owner(tensor: DTensor) -> torch.Tensor:
    """The owner's part, on all ranks, which call this together."""
    return _brought(tensor._local_tensor, tensor._spec)


def _brought(local: torch.Tensor, spec: Any) -> torch.Tensor:
    mesh, placements = spec.mesh, spec.placements
    shape, _ = compat.local_shape_and_offset(spec.tensor_meta.shape, mesh, as_at_owner(placements))
    shape = local_shape(shape, mesh, placements)
    # Parts keep the order of dims in memory that the whole has, which all ranks know.
    order = memory_order(spec.tensor_meta.stride)
    owner = is_owner(mesh, placements)
    # A copy at the owner, too: whoever writes to it writes to the same on every rank.
    part = local.new_empty([shape[dim] for dim in order])
    if owner:
        part.copy_(local.detach().permute(order))
    for axis, placement in enumerate(placements):
        if isinstance(placement, SingleRank):
            dist.broadcast(compat.as_transferable(part), group=mesh.get_group(axis), group_src=placement.rank)
    return part.permute(inverse(order))


def at_owner(local: torch.Tensor, spec: Any) -> tuple[torch.Tensor, Any]:
    """A part and its spec without owners: brought to all ranks, where there are any."""
    if not is_owned(spec.placements):
        return local, spec
    like = torch.empty_strided(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="meta")
    return _brought(local, spec), compat.dtensor_spec(spec.mesh, as_at_owner(spec.placements), like)


def as_dtensor_knows(local: torch.Tensor, spec: Any) -> tuple[torch.Tensor, Any]:
    """A part and its spec with placements of DTensor's own alone; all ranks call this together."""
    return gathered_inner(*at_owner(local, spec))
