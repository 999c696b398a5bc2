"""Shard whole tensors and gather placed ones, differentiably."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from hpml_compiler.runtime.placements.accumulate_grad import accumulate, may_accumulate
from hpml_compiler.runtime.placements.gather_parts import gathered_from_parts
from hpml_compiler.runtime.placements.inner_shard import inner_part, local_shape
from hpml_compiler.runtime.placements.sharded_gradients import gradient_kind
from hpml_compiler.runtime.placements.single_rank_placement import (
    as_at_owner,
    from_owner,
    is_owned,
    is_owner,
    no_rows,
    unknown_to_dtensor,
)
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from passes import compat


@compat.untraced
def to_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor to a whole plain tensor, differentiably; other tensors are returned as they are.

    All ranks must call this, and get the same value. The incoming gradient is whole and equal on all ranks too; each rank
    takes its part without communication. While Dynamo traces, there is no communication.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    as_whole = getattr(tensor, "as_whole", None)
    if as_whole is not None and not compat.is_fake(tensor._local_tensor):  # the class gathers itself
        return as_whole()
    if compat.inside_transform():  # of torch.func, and the parameter is not one of its arguments
        with compat.outside_transforms():
            return _whole(tensor)
    return _whole(tensor)


def _whole(tensor: DTensor) -> torch.Tensor:
    return _GatherTensor.apply(tensor) if tensor.requires_grad and torch.is_grad_enabled() else _value(tensor)


def _value(tensor: DTensor) -> torch.Tensor:
    local = tensor._local_tensor
    if compat.is_fake(local):  # Dynamo only needs shape and dtype
        return local.new_empty_strided(tensor.shape, tensor.stride())
    if all(placement.is_replicate() for placement in tensor.placements):
        return local.detach()  # autograd marks the outputs of a Function, so a new object
    require_all_ranks("gathering a tensor of the model")
    return gathered_from_parts(local, tensor._spec)


def local_shard(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a whole plain tensor that is equal on all ranks, without communication.

    A part smaller than the whole gets its own storage, so that the whole can be freed; strides keep their order.
    """
    shape, offset = compat.local_shape_and_offset(tensor.shape, mesh, as_at_owner(placements))
    if not is_owner(mesh, placements):
        return tensor.new_empty(no_rows(local_shape(shape, mesh, placements)))
    part = tensor
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        part = part.narrow(dim, start, size)
    part = inner_part(part, mesh, placements)
    return tensor if part.shape == tensor.shape else part.clone()


def place_again(tensor: DTensor, placements: Sequence[Placement]) -> None:
    """Give a tensor other placements, in place. An owned one only gets another owner, to which its part is sent, others are
    gathered for a moment. All ranks must call this together."""
    spec: Any = tensor._spec
    like = torch.empty_strided(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="meta")
    if is_owned(spec.placements):
        part = from_owner(tensor)
        part = part if is_owner(spec.mesh, placements) else part.new_empty(no_rows(part.shape))
    else:
        part = local_shard(to_full_tensor(tensor), spec.mesh, placements)
    tensor._local_tensor, tensor._spec = part, compat.interned_spec(compat.dtensor_spec(spec.mesh, placements, like))


def part_of_gradient(gradient: torch.Tensor, spec: Any) -> torch.Tensor:
    """This rank's part of a gradient that is whole, or placed as the owner sees it."""
    with compat.plain_torch_functions():
        if isinstance(gradient, DTensor):
            part = gradient.redistribute(spec.mesh, as_at_owner(spec.placements))._local_tensor
            return part if is_owner(spec.mesh, spec.placements) else part.new_empty(no_rows(part.shape))
        return local_shard(gradient, spec.mesh, spec.placements)


def without_partial(spec: Any, like: torch.Tensor) -> Any:
    """The DTensorSpec with Replicate in place of Partial. like: a whole tensor."""
    if not any(placement.is_partial() for placement in spec.placements):
        return spec
    placements = [Replicate() if placement.is_partial() else placement for placement in spec.placements]
    return compat.dtensor_spec(spec.mesh, placements, like)


class _GatherTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.kind, ctx.spec = type(tensor), tensor._spec
        ctx.owned = tensor if unknown_to_dtensor(tensor.placements) else None
        ctx.set_materialize_grads(False)
        value = _value(tensor)
        if compat.is_fake(tensor._local_tensor):
            return value
        if not value.dim():
            return value.clone()  # a loss may be changed in place; autograd forbids that for a view made here
        if value.untyped_storage().data_ptr() == tensor._local_tensor.untyped_storage().data_ptr():
            return value
        return value.new_empty(0).set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        if torch.is_grad_enabled():  # create_graph=True
            return _ShardGradient.apply(gradient, ctx.kind, ctx.spec)
        part = _part(gradient, ctx.kind, ctx.spec)
        if ctx.owned is not None and may_accumulate(ctx, (ctx.owned,)):  # the engine adds up as DTensor does
            with compat.plain_torch_functions():
                accumulate((ctx.owned,), (part._local_tensor,), ctx.kind)
            return None
        return part


class _ShardGradient(torch.autograd.Function):
    """Backward of `_GatherTensor` as an autograd function, for second derivatives."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, kind: type, spec: Any) -> torch.Tensor:
        return _part(gradient, kind, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return to_full_tensor(gradients[0]), None, None


def _part(gradient: torch.Tensor, kind: type, spec: Any) -> Any:
    spec = without_partial(spec, gradient)
    part = local_shard(gradient, spec.mesh, spec.placements)
    # The incoming gradient may be expanded, or referenced elsewhere, where in-place clipping would be visible.
    return compat.make_dtensor(gradient_kind(kind, spec), part.clone() if part is gradient else part, spec)
