"""Accumulate gradients into `.grad` of placed leaves without autograd's engine, where it would do nothing else with them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.placements.gather_parts import gathered_from_parts
from hpml_compiler.runtime.placements.sharded_gradients import gradient_kind
from passes import compat

IN_EAGER_GRAPH = "in_eager_graph"
"""Attribute of a leaf that an eager op has put into an autograd graph: scripts can then reach its AccumulateGrad node
(`p.expand_as(p).grad_fn.next_functions`, `get_gradient_edge`), and torch does not report whether that node has hooks."""


def note_eager_use(leaf: DTensor) -> None:
    setattr(leaf, IN_EAGER_GRAPH, True)


def may_accumulate(ctx: Any, leaves: Sequence[DTensor]) -> bool:
    """True if the engine would only add dense gradients to `.grad`: no hooks, and not `autograd.grad` of these leaves."""
    if any(t._backward_hooks or t._post_accumulate_grad_hooks or not t.is_leaf or getattr(t, IN_EAGER_GRAPH, False) or (
            t.grad is not None and not is_plain(t)) for t in leaves):
        return False
    return compat.will_accumulate([node for node, _ in ctx.next_functions])


def is_plain(leaf: DTensor) -> bool:
    """True if the engine would add to the gradient in place: it is dense, has no graph, and has the leaf's dtype."""
    grad: Any = leaf.grad
    return grad.layout is torch.strided and not grad.requires_grad and grad.dtype == leaf.dtype


def accumulate(leaves: Sequence[DTensor], gradients: Sequence[torch.Tensor | None], kind: type) -> None:
    """Accumulate as autograd's AccumulateGrad node does: a gradient without other references is taken, any other is copied.
    (Different gradients share no memory: `passes.transforms.cleanup.unalias_gradients`.) gradients: this rank's parts."""
    seen: set[int] = set()
    for tensor, gradient in zip(leaves, gradients, strict=True):
        if gradient is None or not tensor.requires_grad:  # frozen since forward
            continue
        old: Any = tensor.grad
        if old is None:
            held = id(gradient) in seen or compat.use_count(gradient) > 1
            seen.add(id(gradient))
            if held or gradient.stride() != tensor._local_tensor.stride():
                gradient = torch.empty_like(tensor._local_tensor).copy_(gradient)
            tensor.grad = compat.make_dtensor(kind, gradient, tensor._spec)
        elif type(old) is kind and (old._spec is tensor._spec or (
                old.placements == tensor.placements and old.device_mesh == tensor.device_mesh)):
            old._local_tensor.add_(gradient)
        elif all(placement.is_replicate() for placement in old.placements):  # in the script's own memory
            old._local_tensor.add_(gathered_from_parts(gradient, tensor._spec))
        else:
            old.add_(wrapped(gradient, tensor, kind))


def wrapped(gradient: torch.Tensor, tensor: DTensor, kind: type) -> Any:
    return compat.make_dtensor(gradient_kind(kind, tensor._spec), gradient, tensor._spec)
