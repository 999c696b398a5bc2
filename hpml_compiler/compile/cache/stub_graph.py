"""Stub of a Dynamo graph, which AOTAutograd traces instead of a graph whose compiled halves are in the cache.

AOTAutograd makes the layer between a script and compiled code: which arguments have gradients, what the results are, the node
in autograd's graph. It needs the inputs, the mutations and the results for that, but not the computation.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from passes import compat
from passes.graph.fx_nodes import returned_nodes


@dataclass(frozen=True)
class StubResult:
    """A result of a graph that is a new tensor: no argument, and no alias of an argument or of another result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool

    @staticmethod
    def like(value: torch.Tensor, differentiable: bool) -> StubResult:
        value = compat.substitute_symbols(value)
        return StubResult(tuple(value.shape), tuple(value.stride()), value.dtype, value.device, differentiable)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class _EmptyResults(torch.autograd.Function):
    """Makes results and gradients of the right shapes, without values."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[StubResult], *arguments: Any) -> Any:
        made = [result.empty() for result in results]
        ctx.mark_non_differentiable(*(x for x, result in zip(made, results, strict=True) if not result.differentiable))
        ctx.like = [StubResult.like(x, True) if needed else None
                    for x, needed in zip(arguments, ctx.needs_input_grad[1:], strict=True)]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return (None, *(None if like is None else like.empty() for like in ctx.like))


def returns_new_tensors(gm: GraphModule) -> bool:
    """True if a Dynamo graph returns only tensors, each once, and returns no input directly."""
    returned = returned_nodes(gm)
    if len(set(returned)) < len(returned) or any(node is None or node.op == "placeholder" for node in returned):
        return False
    return all(node is not None and isinstance(node.meta.get("example_value"), torch.Tensor) for node in returned)


def stub_of(gm: GraphModule, results: Sequence[StubResult], written: Sequence[compat.MutatedInput]) -> GraphModule:
    """A graph with the same inputs, mutations and results as `gm`, for which `returns_new_tensors` is true."""
    graph, (output,) = Graph(), gm.graph.find_nodes(op="output")
    new = {node: graph.node_copy(node) for node in _placeholders(gm)}

    def nothing(*arguments: Any) -> Any:
        made = _EmptyResults.apply(results, *arguments)
        for each in written:
            with torch.set_grad_enabled(not each.without_gradients):
                arguments[each.position].copy_(torch.empty_like(arguments[each.position]))
        return made

    made = graph.call_function(nothing, tuple(new.values()))
    for k, node in enumerate(returned_nodes(gm)):
        assert node is not None, "see returns_new_tensors"
        new[node] = graph.call_function(operator.getitem, (made, k))
        new[node].meta.update(node.meta)
    graph.output(torch.fx.map_arg(output.args[0], lambda node: new[node]))
    empty = GraphModule(torch.nn.Module(), graph)
    empty.meta.update(gm.meta)
    return empty


def _placeholders(gm: GraphModule) -> list[Any]:
    return list(gm.graph.find_nodes(op="placeholder"))
