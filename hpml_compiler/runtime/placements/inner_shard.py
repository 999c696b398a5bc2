"""Placement that shards an inner factor of a dim, such as the heads of fused QKV weights (3 x heads x width rows).

Rank k has the k-th chunk of each of the outer blocks of rows. torch's private `_StridedShard` can express this on a mesh of
one axis, but is meant for the order of two axes, and changes between releases. DTensor has no rules for this placement: where
`unknown_to_dtensor` is true, the runtime gathers first, or works on local parts.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from passes import compat

c10d = torch.ops._c10d_functional


class InnerShard(Placement):
    """Shards `dim`, unflattened to (outer, inner), along inner. Axes that shard one dim this way have the same `outer`; earlier
    axes are the outer ones. It is never combined with `Shard(dim)`. Sizes are divisible."""

    dim: int
    outer: int

    def __init__(self, dim: int, outer: int) -> None:
        super().__init__()  # Placement is a C++ class, so this cannot be a dataclass
        self.dim, self.outer = dim, outer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InnerShard) and (self.dim, self.outer) == (other.dim, other.outer)

    def __hash__(self) -> int:
        return hash((InnerShard, self.dim, self.outer))

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return InnerShard, (self.dim, self.outer)

    def __repr__(self) -> str:
        return f"InnerShard(dim={self.dim}, outer={self.outer})"

    __str__ = __repr__


def inner_axes(placements: Sequence[Placement]) -> Iterator[tuple[int, InnerShard]]:
    """(axis, placement) of the axes with an `InnerShard`."""
    return ((axis, placement) for axis, placement in enumerate(placements) if isinstance(placement, InnerShard))


def blocks_along(dim: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """Number of equal blocks that the axes split a dim into; its size must be a multiple of it."""
    inner = {axis: placement for axis, placement in inner_axes(placements) if placement.dim == dim}
    outer = next((placement.outer for placement in inner.values()), 1)
    return outer * math.prod(mesh.size(axis) for axis, placement in enumerate(placements)
                             if axis in inner or placement.is_shard(dim))


def without_inner(placements: Sequence[Placement]) -> list[Placement]:
    """The placements with Replicate in place of InnerShard."""
    return [Replicate() if isinstance(placement, InnerShard) else placement for placement in placements]


def local_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Shape of this rank's part, counting only InnerShard placements."""
    result = list(shape)
    for axis, placement in inner_axes(placements):
        result[placement.dim] //= mesh.size(axis)
    return tuple(result)


def inner_part(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a tensor, counting only InnerShard placements: a copy with the tensor's dim order in memory, or a
    view if there are none."""
    order = memory_order(tensor.stride())
    part = tensor.permute(order)
    for axis, placement in inner_axes(placements):
        dim = order.index(placement.dim)
        apart = part.unflatten(dim, (placement.outer, mesh.size(axis), -1))
        part = apart.select(dim + 1, mesh.get_local_rank(axis)).flatten(dim, dim + 1)
    return part.permute(inverse(order))


def gathered_inner(local: torch.Tensor, spec: Any) -> tuple[torch.Tensor, Any]:
    """Gather a part along its InnerShard axes; returns it with its new spec. All ranks must call this together."""
    found = list(inner_axes(spec.placements))
    if not found:
        return local, spec
    for axis, placement in reversed(found):
        local = put_together(all_gathered(local.detach(), spec.mesh, axis), placement)
    like = torch.empty_strided(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="meta")
    return local, compat.dtensor_spec(spec.mesh, without_inner(spec.placements), like)


def all_gathered(local: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """All-gather of the parts of an axis, stacked along a new first dim."""
    part = local.contiguous()
    begun = c10d.all_gather_into_tensor.default(compat.as_transferable(part), mesh.size(axis), mesh.get_group(axis).group_name)
    return c10d.wait_tensor.default(begun).view(part.dtype).view(mesh.size(axis), *part.shape)


def put_together(parts: torch.Tensor, placement: InnerShard) -> torch.Tensor:
    """Merge parts that are stacked along the first dim to one tensor."""
    dim = placement.dim
    return parts.unflatten(dim + 1, (placement.outer, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)


def memory_order(strides: Sequence[int]) -> list[int]:
    """Dims by descending stride."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def chunk_offsets(placements: Sequence[Placement], mesh: DeviceMesh, shape: Sequence[int],
                  ) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(offset in the whole, offset in the part, sizes) of the blocks of this rank's part along dims with an InnerShard; in
    other dims offsets are 0 and sizes those of `shape`, the part's shape."""
    blocks = [((0,) * len(shape), (0,) * len(shape), tuple(shape))]
    for dim in dict.fromkeys(placement.dim for _, placement in inner_axes(placements)):
        outer, ways, mine = 1, 1, 0
        for axis, placement in inner_axes(placements):
            if placement.dim == dim:
                outer, ways, mine = placement.outer, ways * mesh.size(axis), mine * mesh.size(axis) + mesh.get_local_rank(axis)
        rows = shape[dim] // outer
        blocks = [(_at(whole, dim, (k * ways + mine) * rows), _at(part, dim, k * rows), _at(sizes, dim, rows))
                  for whole, part, sizes in blocks for k in range(outer)]
    return blocks


def _at(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1:])
