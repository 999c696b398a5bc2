"""Gradients of sharded tensors, which have a graph with create_graph=True."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.placements.shard_and_gather import part_of_gradient, to_full_tensor
from hpml_compiler.runtime.placements.single_rank_placement import as_at_owner, is_owned
from passes import compat


def placed_gradient(gradient: torch.Tensor, spec: Any, kind: type) -> torch.Tensor:
    """The gradient of a sharded tensor, of that of its whole value. kind: class of placed tensors."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        return _PlacedGradient.apply(to_full_tensor(gradient), spec, kind)
    return _placed(gradient, spec, kind)


def _placed(gradient: torch.Tensor, spec: Any, kind: type) -> Any:
    with compat.plain_torch_functions():
        if is_owned(spec.placements):  # autograd cannot add up gradients that one rank alone has
            spec = compat.dtensor_spec(spec.mesh, as_at_owner(spec.placements), gradient)
        return compat.make_dtensor(kind, part_of_gradient(gradient, spec), spec)


class _PlacedGradient(torch.autograd.Function):
    """Autograd function from a whole gradient, equal on all ranks, to a placed one."""

    @staticmethod
    @compat.untraced
    def forward(ctx: Any, gradient: torch.Tensor, spec: Any, kind: type) -> Any:
        ctx.set_materialize_grads(False)
        return _placed(gradient, spec, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None if gradient is None else to_full_tensor(gradient), None, None


class LocalPart(torch.autograd.Function):
    """Autograd function from a sharded tensor, or a whole one, to this rank's part. kind: class of the gradient."""

    @staticmethod
    @compat.untraced
    def forward(ctx: Any, tensor: Any, spec: Any, kind: type) -> torch.Tensor:
        ctx.spec, ctx.kind = spec, kind
        ctx.set_materialize_grads(False)
        with compat.plain_torch_functions():
            as_wanted = isinstance(tensor, DTensor) and tensor._spec.placements == spec.placements
            return tensor._local_tensor.detach() if as_wanted else part_of_gradient(tensor, spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else _FromPart.apply(gradient, ctx.spec, ctx.kind), None, None


class _FromPart(torch.autograd.Function):
    """Inverse of `LocalPart`."""

    @staticmethod
    @compat.untraced
    def forward(ctx: Any, part: torch.Tensor, spec: Any, kind: type) -> Any:
        ctx.spec, ctx.kind = spec, kind
        ctx.set_materialize_grads(False)
        with compat.plain_torch_functions():
            return compat.make_dtensor(kind, part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None if gradient is None else LocalPart.apply(gradient, ctx.spec, ctx.kind), None, None
