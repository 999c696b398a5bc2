"""Shapes: shape, dtype and bytes of the results of every node."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from passes.annotations import Key, write
from passes.base import AnalysisPass, PassError
from passes.compat import pytree, size_hint
from passes.pass_result import attribute_of
from passes.registry import register


@dataclass(frozen=True)
class TensorSpec:
    """One result tensor of a node.

    shape: sizes; for a symbolic size the number it had when the graph was traced. bytes: elements times item size,
    whatever the strides (an expanded tensor counts as if it were copied). symbolic: the expression of each size
    (`("s0", "128")`) if any is symbolic, else empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    symbolic: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _is_value(node: fx.Node) -> bool:
    return node.op != "output"


SHAPES: Key[tuple[TensorSpec, ...]] = Key("shapes", tuple[TensorSpec, ...], selects=_is_value)
"""The tensors a node returns, flattened in order; non-tensors (None, a symbolic size, a subgraph) are left out."""


@register
@dataclass(frozen=True)
class Shapes(AnalysisPass):
    """Reads `meta["val"]`, as tracing with fake tensors leaves it, and writes `SHAPES` on every node but the output.

    unbacked_size: stands for a size that depends on data, such as the length of `nonzero`; the default is inductor's
    (`unbacked_symint_fallback` in its configuration).
    """

    name = "shapes"
    provides = (SHAPES,)

    unbacked_size: int = 8192

    def run(self, graph_module: fx.GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if _is_value(node):
                value = self._value(graph_module, node)
                leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                write(SHAPES, node, tuple(tensor_spec(tensor, self.unbacked_size) for tensor in tensors))

    def _value(self, graph_module: fx.GraphModule, node: fx.Node) -> object:
        if "val" in node.meta:
            return node.meta["val"]
        if node.op == "get_attr":  # tracers leave constants and subgraphs without a value
            return attribute_of(graph_module, node)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not schema.returns:  # an assertion, say
            return None
        step = "trace with fake tensors, or run torch.fx.passes.fake_tensor_prop.FakeTensorProp"
        raise PassError("the node has no meta['val']", f"{node.op} {node.name}", step)


def tensor_spec(tensor: torch.Tensor, unbacked_size: int = 8192) -> TensorSpec:
    """The spec of a real, fake or meta tensor. Adds no guard on symbolic sizes."""
    shape = tuple(size_hint(size, unbacked_size) for size in tensor.shape)
    static = all(isinstance(size, int) for size in tensor.shape)
    symbolic = () if static else tuple(str(size) for size in tensor.shape)
    return TensorSpec(shape, tensor.dtype, math.prod(shape) * tensor.dtype.itemsize, symbolic)
