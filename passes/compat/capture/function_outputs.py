"""Outputs of custom autograd Functions in Dynamo's graphs."""
from __future__ import annotations

import operator
from typing import Any

import torch
from packaging.version import Version
from torch.fx import GraphModule


def drop_unread_function_outputs(gm: GraphModule) -> None:
    """Remove the last outputs of custom autograd Functions, where neither the graph reads them nor backward their gradients.

    Dynamo of torch 2.11 adds all tensors that forward writes in place: `y = x.clone(); y *= w; return y` has the outputs
    `y`, `y`. Autograd takes a tensor that is returned twice for the last of them, whose gradient backward does not read: with
    every backend, all gradients would be zero, silently. Torch 2.13 adds none.
    """
    if Version(torch.__version__).release >= (2, 13):
        return
    for owner in gm.modules():
        if isinstance(owner, GraphModule):
            for call in owner.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
                _drop(owner, call)


def _drop(owner: GraphModule, call: Any) -> None:
    forward, backward = (getattr(owner, body.target) for body in call.args[:2])
    output = forward.graph.output_node()
    made, saved = output.args[0]
    gradients = backward.graph.find_nodes(op="placeholder")  # of the outputs, before what is saved
    read = {user.args[1] if user.target is operator.getitem else len(made) - 1 for user in call.users}
    count = len(made)
    while count > 1 and count - 1 not in read and not gradients[count - 1].users:
        count -= 1
        backward.graph.erase_node(gradients[count])
    if count == len(made):
        return
    output.args = ((made[:count], saved),)
    call.update_kwarg("non_differentiable_idx", [k for k in call.kwargs["non_differentiable_idx"] if k < count])
    if "example_value" in call.meta:
        call.meta["example_value"] = call.meta["example_value"][:count]
    for changed in (forward, backward, owner):
        changed.recompile()
