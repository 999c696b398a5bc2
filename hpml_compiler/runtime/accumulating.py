"""Add gradients to `.grad` of placed leaves in their own nodes' backward, where the engine would do nothing else with them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from passes import compat


def may_accumulate(ctx: Any, leaves: Sequence[DTensor]) -> bool:
    """Whether the engine would only add the gradients to `.grad`: no hooks, and nobody else asked for them."""
    if any(t._backward_hooks or t._post_accumulate_grad_hooks or not t.is_leaf for t in leaves):
        return False
    return compat.will_accumulate([node for node, _ in ctx.next_functions])


def accumulate(leaves: Sequence[DTensor], gradients: Sequence[torch.Tensor | None], kind: type) -> None:
    """As autograd's own node: a gradient that nobody else holds is taken as it is, any other is copied. (Gradients that
    are other tensors share no memory: `passes.transform.own_gradients`.) gradients: this rank's parts."""
    seen: set[int] = set()
    for tensor, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        old: Any = tensor.grad
        if old is None:
            held = id(gradient) in seen or compat.use_count(gradient) > 1
            seen.add(id(gradient))
            if held or gradient.stride() != tensor._local_tensor.stride():
                gradient = torch.empty_like(tensor._local_tensor).copy_(gradient)
            tensor.grad = wrapped(gradient, tensor, kind)
        elif type(old) is kind and (old._spec is tensor._spec or (
                old.placements == tensor.placements and old.device_mesh == tensor.device_mesh)):
            old._local_tensor.add_(gradient)
        else:
            old.add_(wrapped(gradient, tensor, kind))


def wrapped(gradient: torch.Tensor, tensor: DTensor, kind: type) -> Any:
    return compat.make_dtensor(kind, gradient, tensor._spec)
