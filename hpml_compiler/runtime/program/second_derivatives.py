"""Second derivatives: compiled graphs have none, and a backward through gradients of one says so.

Calls of the script on sharded outputs have them, as in eager mode, although compiled graphs run in their place: where
`create_graph=True` asks for gradients that have a graph, these calls are made again, on gathered outputs.
"""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.placements.placed_gradient import placed_gradient
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.program.undefined_gradients import node_of
from passes import compat
from passes.errors import HpmlError

KEPT_BYTES = 1024 * 1024
"""Arguments of calls up to this size are kept for second derivatives; larger ones, and outputs, have to be alive then."""


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
        if getattr(ctx, "_hpml_made_again", False):  # the gradients came by another way
            return (None,) * len(ctx.needs_input_grad)
        with torch.no_grad():  # graphs write in place
            found = first(ctx, *gradients)
        return tuple(without_graph(x) if isinstance(x, torch.Tensor) else x for x in found)

    return backward


def without_graph(gradient: torch.Tensor) -> Any:
    """A gradient that refuses second derivatives. Also one without a graph: in torch 2.11, backward of a compiled graph gives
    those where it reads no tensor that requires gradients, as a step in microbatches does, and a penalty on them would be left
    out silently."""
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


def with_second_derivatives(results: Sequence[Any], arguments: Mapping[int, Any], calls: Callable[..., Mapping[int, Any]],
                            modes: Callable[[], contextlib.AbstractContextManager[Any]], kind: type) -> Sequence[Any]:
    """Results of a compiled graph, whose gradients have a graph with create_graph=True.

    arguments: of the script's calls that the graph was compiled from, by number. calls: makes these calls, with a function from
    a number to an argument, and returns the results by number, in this order. modes: of these calls. kind: class of placed
    gradients.
    """
    nodes = [node_of(x) if type(x) is torch.Tensor and x.requires_grad else None for x in results]
    if any(node is None for node in nodes):  # sharded, or without a gradient
        return results
    known = {k: x.used() if getattr(x, "is_whole", False) else x for k, x in arguments.items()}
    again = _CallsAgain(known, calls, modes, nodes, kind)
    return _Again.apply(again, len(results), *results, *[known[k] for k in again.numbers])


class _CallsAgain:
    """Calls in whose place a compiled graph ran. numbers: of the arguments with gradients. nodes: of the graph, in autograd."""

    def __init__(self, arguments: Mapping[int, Any], calls: Callable[..., Mapping[int, Any]],
                 modes: Callable[[], contextlib.AbstractContextManager[Any]], nodes: Iterable[Any], kind: type) -> None:
        self._calls, self._modes, self._kind, self._nodes = calls, modes, kind, [weakref.ref(node) for node in nodes]
        self._arguments = {k: (_reference(x), _version(x)) for k, x in arguments.items()}
        self.numbers = [k for k, x in arguments.items() if x.requires_grad]

    def gradients(self, arriving: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None] | None:
        """Gradients of the arguments, which have a graph; None if an argument is gone or has changed."""
        values = {k: (made(), version) for k, (made, version) in self._arguments.items()}
        possible = all(x is not None and _version(x) == version for x, version in values.values())
        for node in [made() for made in self._nodes]:
            if node is not None:
                node._hpml_made_again = possible
        if not possible:
            return None
        specs = {k: vars(x).get("spec", x._spec) for k, (x, _) in values.items() if isinstance(x, DTensor)}
        with compat.outside_transforms(), self._modes(), torch.enable_grad():
            wholes = {k: to_full_tensor(x) for k, (x, _) in values.items()}
            # an argument that was made of another gets a place of its own among the gradients
            given = {k: x.view_as(x) if k in self.numbers else x for k, x in wholes.items()}
            made = [(x, by) for x, by in zip(self._calls(given.__getitem__).values(), arriving, strict=True) if by is not None]
            found = torch.autograd.grad([x for x, _ in made], [given[k] for k in self.numbers], [by for _, by in made],
                                        create_graph=True, allow_unused=True)
        return [by if by is None or k not in specs else placed_gradient(by, specs[k], self._kind)
                for k, by in zip(self.numbers, found, strict=True)]


def _reference(argument: Any) -> Callable[[], Any]:
    large = argument.requires_grad or argument.numel() * argument.element_size() > KEPT_BYTES
    return weakref.ref(argument) if large else lambda: argument


def _version(argument: Any) -> int | bool:
    """A mark that changes with the values. A sharded output that is changed in place is no longer known to autograd."""
    if hasattr(argument, "is_whole"):
        return argument.is_of_autograd or not (argument.requires_grad or argument.is_whole)
    return getattr(argument, "_local_tensor", argument)._version


class _Again(torch.autograd.Function):
    """Identity of the results of a compiled graph. A backward with create_graph=True goes past that graph."""

    @staticmethod
    def forward(ctx: Any, again: _CallsAgain, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.again, ctx.count = again, count
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in tensors[:count]])

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradients = tuple(None if x is None else to_full_tensor(x) for x in gradients)
        made = ctx.again.gradients(gradients) if torch.is_grad_enabled() else None
        if made is None:
            return None, None, *gradients, *[None for _ in ctx.again.numbers]
        return None, None, *[None for _ in gradients], *made
