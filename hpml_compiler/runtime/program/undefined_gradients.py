"""Undefined gradients: inputs that are read only for outputs without a gradient get None, as in eager.

torch.compile makes zeros of missing gradients, and its backward returns zeros for inputs that only those reach. Optimizers then
decay weights that eager leaves unchanged.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph

log = logging.getLogger("hpml")
Call = Callable[..., Any]
NODE, _MISSING = "CompiledFunctionBackward", "_hpml_undefined_gradients"


def with_undefined_gradients(gm: GraphModule, given: Sequence[Any]) -> Callable[[Call], Call]:
    """Make a wrapper for calls of a graph that drops such gradients. Call this before the graph is compiled, which may change
    it.

    gm, given: the graph and its inputs, as Dynamo passes them. The wrapped call takes the same inputs, or this rank's shards of
    them, and returns the graph's results.
    """
    results = [node for node in returned_nodes(gm) if node is not None]
    inputs = [_Input.of(value) for value in given]
    if not torch.is_grad_enabled() or len(results) < 2 or any(each is None for each in inputs):
        return lambda function: function
    missing = UndefinedGradients(copy_graph(gm), inputs)

    def around(function: Call) -> Call:
        def call(*arguments: Any) -> Any:
            results = function(*arguments)
            missing.watch(arguments, results)
            return results

        return call

    return around


@dataclass(frozen=True)
class _Input:
    """An input of a graph without its data; Dynamo passes a fake for a parameter that is sharded already. number: its value, if
    it is not a tensor."""

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    is_leaf: bool = True
    number: Any = None

    @staticmethod
    def of(value: Any) -> _Input | None:
        if not isinstance(value, torch.Tensor):
            return _Input(number=value)
        known = type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, DTensor) or compat.is_fake(value)
        if value.layout is not torch.strided or not known or any(isinstance(size, torch.SymInt) for size in value.shape):
            return None
        return _Input(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, value.is_leaf)

    def fake(self) -> tuple[Any, Any]:
        """A tensor for the graph under a fake mode, and the leaf that its gradient goes to."""
        if self.dtype is None:
            return self.number, None
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if not self.requires_grad:
            return made, None
        made.requires_grad_()
        return (made if self.is_leaf else made.view_as(made) * 1), made


class UndefinedGradients:
    """Inputs of one compiled graph that get no gradient when some outputs get none."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self._gm, self._inputs = gm, inputs
        self._places: dict[int, list[int]] = {}
        """Output of the graph's autograd node -> results that share its gradient: views of one base do."""
        self._positions: list[int | None] = []
        """For each edge of that node, the input that its gradient belongs to."""
        self._first: int | None = None
        """A result to find the node by; -1 where fewer than two have gradients, None before the first call."""
        self._dropped: dict[frozenset[int], frozenset[int]] = {}
        """Outputs of the node that gradients arrived at -> edges whose gradients are None then, once known."""

    def watch(self, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        """Call this after each call. The paths of gradients are the same in each recorded call, so they are found once."""
        if not torch.is_grad_enabled():
            return
        if self._first is None:
            self._first = self._look(arguments, results)
        if self._first >= 0 and (place := _place_of(results[self._first])) is not None:
            _CallHooks(self, place[0])

    def _look(self, arguments: Sequence[Any], results: Sequence[Any]) -> int:
        """Find the node and its edges. Returns one of its results, or -1 where fewer than two have gradients."""
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        before = {id(x.grad_fn) for x in tensors}
        found = {k: place for k, x in enumerate(results) if isinstance(x, torch.Tensor) and x.requires_grad
                 if (place := _place_of(x)) is not None and id(place[0]) not in before}
        places: dict[int, list[int]] = {}
        for k, (_, number) in found.items():
            places.setdefault(number, []).append(k)
        if len(places) < 2 or len({id(node) for node, _ in found.values()}) != 1:
            return -1
        first = min(found)
        self._places, self._positions = places, _positions_of(found[first][0], arguments)
        return first

    def drops(self, arrived: frozenset[int]) -> bool | None:
        """True if some gradients are undefined when gradients arrived at these outputs of the node; None if unknown yet."""
        if not arrived <= self._places.keys():  # at an input that the graph mutates: not examined
            return False
        if arrived == self._places.keys():
            return False
        known = self._dropped.get(arrived)
        return None if known is None else bool(known)

    def kept(self, arrived: frozenset[int], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients for the edges, with None for undefined ones."""
        if arrived not in self._dropped:
            self._dropped[arrived] = self._without_path(arrived, gradients)
        dropped = self._dropped[arrived]
        return tuple(None if k in dropped else gradient for k, gradient in enumerate(gradients))

    def _without_path(self, arrived: frozenset[int], gradients: Sequence[Any]) -> frozenset[int]:
        # A gradient that is not all zeros has a path, and a graph has the same paths at each call.
        zeros = [k for k, gradient in enumerate(gradients) if gradient is not None and _may_be_zero(gradient)
                 and self._positions[k] is not None]
        if not zeros:
            return frozenset()
        try:
            reached = self._reached([place for number in arrived for place in self._places[number]])
        except Exception as error:
            log.warning("parameters that no used output depends on may get zero gradients instead of None: the graph cannot "
                        "be run on fake tensors to find them (%s: %s)", type(error).__name__, str(error).split("\n")[0])
            return frozenset()
        return frozenset(k for k in zeros if self._positions[k] not in reached)

    def _reached(self, places: Sequence[int]) -> set[int]:
        """Inputs that get gradients in eager when gradients arrive at these results, found with fake tensors."""
        with compat.outside_tracing(), compat.tracing_fake_mode(), torch.enable_grad():
            values, leaves = zip(*(each.fake() for each in self._inputs), strict=True)
            results = self._gm(*values)
            used = [results[k] for k in places if isinstance(results[k], torch.Tensor) and results[k].requires_grad]
            wanted = [(k, leaf) for k, leaf in enumerate(leaves) if leaf is not None]
            found = torch.autograd.grad(used, [leaf for _, leaf in wanted], [torch.empty_like(x) for x in used],
                                        allow_unused=True)
        return {k for (k, _), gradient in zip(wanted, found, strict=True) if gradient is not None}


class _CallHooks:
    """Hooks of one call. They have no reference to the node, which refers to them."""

    def __init__(self, missing: UndefinedGradients, node: Any) -> None:
        self.missing, self.follows = missing, False
        node.register_prehook(self.before)
        setattr(node, _MISSING, missing)

    def before(self, arriving: Sequence[Any]) -> None:
        """Add the post-hook only where it is needed: it keeps all incoming gradients alive until it is called."""
        node = compat.running_node()  # None while compiled autograd traces: there, zeros stay
        if node is not None and not self.follows and self.missing.drops(_arrived(arriving)) is not False:
            self.follows = True
            node.register_hook(self.after)

    def after(self, gradients: Sequence[Any], arriving: Sequence[Any]) -> tuple[Any, ...] | None:
        arrived = _arrived(arriving)
        return None if self.missing.drops(arrived) is False else self.missing.kept(arrived, gradients)


@dataclass(frozen=True)
class NodeGradients:
    """The autograd node of a compiled graph, and the gradients that its backward gives for its edges."""

    node: Any
    gradients: Sequence[torch.Tensor | None]


def gradients_of_node(results: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]) -> NodeGradients:
    """Call backward of the graph that made these results, outside of autograd: no hooks run, and nothing is accumulated.
    arriving: gradients at them."""
    places = {k: place for k, x in results.items() if (place := _place_of(x)) is not None}
    (node,) = {place[0] for place in places.values()}
    edges = [torch.autograd.graph.GradientEdge(*place) for place in places.values()]
    with compat.plain_torch_functions():
        found = torch.autograd.grad([results[k] for k in places], edges, [arriving[k] for k in places], allow_unused=True)
    sent = {place[1]: x for place, x in zip(places.values(), found, strict=True) if x is not None}
    like = node._input_metadata
    given = [sent[k] if k in sent else torch.zeros(each.shape, dtype=each.dtype, device=each.device)
             for k, each in enumerate(like)]
    gradients = compat.keeping_no_graph(lambda: node.apply(*given))
    missing: UndefinedGradients | None = getattr(node, _MISSING, None)
    if missing is not None and missing.drops(frozenset(sent)) is not False:
        gradients = missing.kept(frozenset(sent), gradients)
    return NodeGradients(node, gradients)


def _arrived(arriving: Sequence[Any]) -> frozenset[int]:
    return frozenset(k for k, gradient in enumerate(arriving) if gradient is not None)


def node_of(result: torch.Tensor) -> Any:
    """The autograd node of the compiled graph behind a result, or None."""
    place = _place_of(result)
    return None if place is None else place[0]


def _place_of(result: torch.Tensor) -> tuple[Any, int] | None:
    """The autograd node of the compiled graph behind a result, which may be a view of one of the node's outputs."""
    node, number = result.grad_fn, result.output_nr
    while node is not None and node.name() != NODE:
        node, number = node.next_functions[0] if len(node.next_functions) == 1 else (None, 0)
    return None if node is None else (node, number)


def _positions_of(node: Any, arguments: Sequence[Any]) -> list[int | None]:
    leaves = {id(x): k for k, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf}
    made = {(id(x.grad_fn), x.output_nr): k for k, x in enumerate(arguments) if isinstance(x, torch.Tensor) and not x.is_leaf}
    return [leaves.get(id(each.variable)) if hasattr(each, "variable") else made.get((id(each), number))
            for each, number in node.next_functions]


def _may_be_zero(gradient: torch.Tensor) -> bool:
    """True if all entries are zero or NaN, which zeros times infinity give."""
    try:
        return not bool(gradient.nan_to_num(0.0).any())
    except NotImplementedError:  # not implemented for this dtype, such as float8
        return True
