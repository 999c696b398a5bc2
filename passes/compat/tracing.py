"""Tracing by AOTAutograd and the fake tensors that it traces with."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    """`torch._dynamo.backends.common.aot_autograd`: a backend that traces forward and backward into one graph."""
    from torch._dynamo.backends.common import aot_autograd as make_backend

    return make_backend(**kwargs)


@contextlib.contextmanager
def outside_tracing() -> Any:
    """A context in which tensors are real again, inside a backend: for communication while a graph is traced.

    The Python dispatcher is off too. With it on, a collective is queued by a thread that holds the GIL and waits for
    gloo's queue, while gloo's thread holds the queue and waits for the GIL to free the tensors of the collective before:
    a deadlock, seen in one of a hundred compilations on 2 ranks.
    """
    with no_python_dispatcher(), _disable_current_modes():
        yield


@functools.cache
def tracing_fake_mode() -> Any:
    """A fake mode for planning without devices; real constants inside a model are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode() -> Any:
    """The fake mode that Dynamo is tracing under; raises RuntimeError outside a backend."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("not called by Dynamo: there is no tracing context")
    return context.fake_mode


def fake_mode_of(gm: torch.fx.GraphModule) -> Any:
    """The fake mode that a traced graph's values live in, or None if they are real."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a FakeTensor: shape and dtype without data, as Dynamo traces with."""
    return type(tensor) is FakeTensor


def is_effect_token(placeholder: torch.fx.Node) -> bool:
    """Whether it is no input of the model, but what AOTAutograd orders side effects by (checks of torch.linalg, prints)."""
    return type(placeholder.meta.get("desc")).__name__ == "ForwardTokenAOTInput"


def inputs_written(joint: torch.fx.GraphModule) -> set[int]:
    """Positions of the inputs that the traced program changes in place: AOTAutograd has the graph return their new values,
    and copies these into the inputs after each call."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = joint.graph.find_nodes(op="output")
    found = (getattr(described, "mutated_input", None) for described in pytree.tree_leaves(output.meta.get("desc", ()))
             if isinstance(described, InputMutationAOTOutput))
    return {cast("Any", given).idx for given in found if hasattr(given, "idx")}
