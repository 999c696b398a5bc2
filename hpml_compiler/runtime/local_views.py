"""From placed tensors to local ones and, with the gradients, back: once per graph, for all of them."""
from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.accumulating import accumulate, may_accumulate, wrapped
from hpml_compiler.runtime.owned import brought, is_owner
from hpml_compiler.runtime.placed import PlacedTensor
from passes import compat


class LocalViews(torch.autograd.Function):
    """`LocalViews.apply(borrowed, *placed)`: the local parts, as plain tensors. borrowed: places of those whose owners' parts
    all ranks need; the gradient that arrives is the same on all, and the owner keeps it.

    A gradient is wrapped with its parameter's own placement. In an ordinary `backward()` it is put into `.grad` here,
    since the engine would call Python several times for each DTensor: 200 parameters cost 0.4 ms instead of 2 ms.
    """

    @staticmethod
    def forward(ctx: Any, borrowed: Container[int], *placed: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.placed, ctx.borrowed = placed, borrowed
        ctx.set_materialize_grads(False)
        return tuple([brought(tensor) if k in borrowed else tensor._local_tensor.detach() for k, tensor in enumerate(placed)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with compat.plain_torch_functions():
            if ctx.borrowed:
                gradients = tuple(_owners(gradient, tensor) if k in ctx.borrowed else gradient
                                  for k, (gradient, tensor) in enumerate(zip(gradients, ctx.placed, strict=True)))
            if not torch.is_grad_enabled() and may_accumulate(ctx, ctx.placed):
                accumulate(ctx.placed, gradients, PlacedTensor)
                return (None,) * (1 + len(gradients))
            return (None, *[None if gradient is None else wrapped(gradient, tensor, PlacedTensor)
                          for tensor, gradient in zip(ctx.placed, gradients, strict=True)])


def _owners(gradient: torch.Tensor | None, tensor: DTensor) -> torch.Tensor | None:
    """What this rank keeps of it: all, or no rows."""
    if gradient is None or is_owner(tensor.device_mesh, tensor.placements):
        return gradient
    return torch.empty_like(tensor._local_tensor)
