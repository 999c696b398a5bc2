"""Second derivatives: compiled graphs have none, and a backward through gradients of one says so."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hpml_compiler.runtime.program.undefined_gradients import node_of
from passes import compat
from passes.errors import HpmlError


class NoSecondDerivative(HpmlError, RuntimeError):
    """A backward through gradients of a compiled graph. AOTAutograd raises a RuntimeError, which scripts may catch."""


def without_second_derivatives(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap calls of a compiled graph so that second derivatives raise NoSecondDerivative in place of AOTAutograd's error."""
    unknown = True

    def call(*arguments: Any) -> Any:
        nonlocal unknown
        results = function(*arguments)
        if unknown and torch.is_grad_enabled():
            unknown = not _explain(results)
        return results

    return call


def _explain(results: Iterable[Any]) -> bool:
    """Replace backward of the autograd functions that made these results. Returns True if there are any."""
    nodes = [node_of(x) for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    found = {compat.autograd_function(node) for node in nodes if node is not None}
    for each in found:
        if not hasattr(each, "_hpml_first_derivative"):
            each._hpml_first_derivative = each.backward
            each.backward = staticmethod(_marking(each.backward))
    return bool(found)


def marked(gradient: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The gradient that `compute` makes of another in a backward; it has no second derivative."""
    with torch.no_grad():
        found = compute(gradient)
    return _Marked.apply(found.requires_grad_()) if torch.is_grad_enabled() and gradient.requires_grad else found


def _marking(first: Callable[..., Any]) -> Callable[..., Any]:
    @compat.untraced
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():  # no create_graph=True
            return first(ctx, *gradients)
        with torch.no_grad():  # graphs write in place
            found = first(ctx, *gradients)
        return tuple(_marked(x) if isinstance(x, torch.Tensor) else x for x in found)

    return backward


def _marked(gradient: torch.Tensor) -> Any:
    """Also one without a graph: in torch 2.11, backward of a compiled graph gives those where it reads no tensor that requires
    gradients, as a step in microbatches does, and a penalty on them would be left out silently."""
    if not gradient.requires_grad and (gradient.is_floating_point() or gradient.is_complex()):
        gradient = gradient.detach().requires_grad_()
    return _Marked.apply(gradient) if gradient.requires_grad else gradient


class _Marked(torch.autograd.Function):
    """A gradient whose own graph ends here."""

    @staticmethod
    @compat.untraced  # in a compiled function it would become a graph, and a shard of a gradient a batch of it
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NoSecondDerivative(
            "backward needs a second derivative: it reaches gradients that a compiled graph computed with create_graph=True, "
            "and graphs of torch.compile have no second derivatives, with any backend", "backward through a compiled graph",
            "compute those gradients with the uncompiled model, as for a gradient penalty; in a compiled function, decorate "
            'the part that they go through with torch.compiler.disable; for gradients at outputs of it, set outputs="whole"')
