"""Placement of a dim whose inner factor is split: fused query, key and value weights, of 3 x heads x width rows, by heads.

Rank k has the k-th chunk of each of the outer blocks of rows. torch's private `_StridedShard` can say that on a mesh of one
axis, but means the order of two axes, and changes with releases. DTensor does not know this placement: where `own_placements`
says that there is one, the runtime gathers first, or works on local parts.
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
    """`dim`, seen as (outer, inner), is split along inner. Axes that split one dim so have the same `outer`; earlier axes are
    the outer ones. No axis has `Shard(dim)` beside it. Sizes divide."""

    dim: int
    outer: int

    def __init__(self, dim: int, outer: int) -> None:
        super().__init__()  # Placement is an object of C++, which no dataclass makes
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
    """(axis, placement) of the axes that split an inner factor."""
    return ((axis, placement) for axis, placement in enumerate(placements) if isinstance(placement, InnerShard))


def blocks_along(dim: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """Equal blocks of a dim that the axes split it into; its size must be a multiple."""
    inner = {axis: placement for axis, placement in inner_axes(placements) if placement.dim == dim}
    outer = next((placement.outer for placement in inner.values()), 1)
    return outer * math.prod(mesh.size(axis) for axis, placement in enumerate(placements)
                             if axis in inner or placement.is_shard(dim))


def without_inner(placements: Sequence[Placement]) -> list[Placement]:
    """The placements with those dims whole."""
    return [Replicate() if isinstance(placement, InnerShard) else placement for placement in placements]


def local_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Shape of this rank's part along these axes alone."""
    result = list(shape)
    for axis, placement in inner_axes(placements):
        result[placement.dim] //= mesh.size(axis)
    return tuple(result)


def inner_part(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part along these axes alone, of a tensor that is whole along them: a copy, whose dims lie in memory in the
    tensor's order, unless there are no such axes."""
    order = memory_order(tensor.stride())
    part = tensor.permute(order)
    for axis, placement in inner_axes(placements):
        dim = order.index(placement.dim)
        apart = part.unflatten(dim, (placement.outer, mesh.size(axis), -1))
        part = apart.select(dim + 1, mesh.get_local_rank(axis)).flatten(dim, dim + 1)
    return part.permute(inverse(order))


def gathered_inner(local: torch.Tensor, spec: Any) -> tuple[torch.Tensor, Any]:
    """A part and its spec with the dims whole of which inner factors are split; all ranks call this together."""
    found = list(inner_axes(spec.placements))
    if not found:
        return local, spec
    for axis, placement in reversed(found):
        local = put_together(all_gathered(local.detach(), spec.mesh, axis), placement)
    like = torch.empty_strided(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="meta")
    return local, compat.dtensor_spec(spec.mesh, without_inner(spec.placements), like)


def all_gathered(local: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Parts of all ranks of an axis along a new first dim."""
    part = local.contiguous()
    begun = c10d.all_gather_into_tensor.default(compat.as_transferable(part), mesh.size(axis), mesh.get_group(axis).group_name)
    return c10d.wait_tensor.default(begun).view(part.dtype).view(mesh.size(axis), *part.shape)


def put_together(parts: torch.Tensor, placement: InnerShard) -> torch.Tensor:
    """Parts, along the first dim, as one tensor."""
    dim = placement.dim
    return parts.unflatten(dim + 1, (placement.outer, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)


def memory_order(strides: Sequence[int]) -> list[int]:
    """Dims in the order in which they lie in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def chunk_offsets(placements: Sequence[Placement], mesh: DeviceMesh, shape: Sequence[int],
                  ) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(offset in the whole, offset in the part, sizes) of the blocks that this rank's part consists of, along the dims of which
    inner factors are split; of other dims the offsets are 0 and the sizes those of `shape`, the part's."""
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
