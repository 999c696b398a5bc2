"""FLOPs: floating point operations of every call, a multiply-add counted as two.

Products of matrices, convolutions and attention are counted by the formulas of `torch.utils.flop_counter`, or by the
ones below where torch has none (CPU attention, grouped matmul) or one that is off: backward through a convolution of g
groups takes as many as two forward passes (gradients of input and weight), where torch 2.13 counts 1 + g. As in torch,
causal attention counts as full attention. Everything else costs one per element: of the larger of input and output for
reductions, of the output otherwise; views, empty tensors and collectives cost nothing.
"""
from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes.analyses.shapes import SHAPES, Shapes, TensorSpec
from passes.annotations import Key, read, write
from passes.base import AnalysisPass
from passes.compat import pytree, size_hint
from passes.graph.fx_nodes import arguments_of, constants_of
from passes.registry import register

_log = logging.getLogger("hpml")

FLOPS: Key[float] = Key("flops", float)
"""Floating point operations of a call_function node."""


@register
@dataclass(frozen=True)
class Flops(AnalysisPass):
    """Writes `FLOPS` on every call. An op without a formula costs one per element of its output."""

    name = "flops"
    requires = (SHAPES,)
    provides = (FLOPS,)

    def run(self, graph_module: fx.GraphModule) -> None:
        known: dict[Hashable, float] = {}
        for node in graph_module.graph.nodes:
            if FLOPS.selects(node):
                write(FLOPS, node, _remembered(node, known))


def _remembered(node: fx.Node, known: dict[Hashable, float]) -> float:
    """FLOPs of a call, cached by its operands' shapes."""
    told = node, *arguments_of(node)
    if any(isinstance(x, torch.SymInt) for each in told for x in pytree.tree_leaves(each.meta.get("val"))):
        return node_flops(node)  # depends on more than shapes
    key = node.target, constants_of(node), tuple(read(SHAPES, each) for each in told)
    if key not in known:
        known[key] = node_flops(node)
    return known[key]


def has_formula(target: Any) -> bool:
    """True if calls of an operator (overload or not) are counted by a formula rather than one per element."""
    return _formula(getattr(target, "overloadpacket", target)) is not None


def node_flops(node: fx.Node) -> float:
    """FLOPs of one call, from the shapes annotated on it and its inputs."""
    packet = getattr(node.target, "overloadpacket", node.target)  # an OpOverload's op, whatever the overload
    formula = _formula(packet)
    if formula is None:
        return _elementwise_flops(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), _as_traced)  # pyright: ignore[reportGeneralTypeIssues]
    try:
        return float(formula(*args, **kwargs, out_val=_as_traced(node)))
    except Exception as error:  # a formula for other arguments than these must not stop the compilation
        _log.warning("FLOPs of %s counted as one per element, its formula failed: %r", node.format_node(), error)
        return _elementwise_flops(node)


def _as_traced(node: fx.Node) -> Any:
    """Result of the node as traced, with meta tensors of static sizes: formulas may compare sizes."""
    specs = iter(read(SHAPES, node))

    def stand_in(value: torch.Tensor | torch.SymInt) -> torch.Tensor | int:
        if isinstance(value, torch.SymInt):
            return size_hint(value, Shapes.unbacked_size)
        spec = next(specs)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    return pytree.tree_map_only((torch.Tensor, torch.SymInt), stand_in, node.meta.get("val"))


def _formula(packet: Any) -> Callable[..., float] | None:
    name = str(packet).rpartition(".")[2]
    own = _OWN.get(str(packet))
    if own is None and "grouped_mm" in name:  # aten's and those that libraries register, such as transformers'
        own = _grouped_mm_backward if name.endswith("_backward") else _grouped_mm
    if own is None and ("scaled_dot_product" in name or "scaled_dot_attention" in name):
        own = _attention_backward if name.endswith("_backward") else _attention
    return own or flop_registry.get(packet)


def _contraction(left: int) -> Callable[..., float]:
    """Ops whose results are sums over the last dim of operand `left`."""
    return lambda *args, out_val, **kwargs: 2.0 * out_val.numel() * args[left].shape[-1]


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> float:
    """2-D rows belong to one group each, whether the groups split m (weight is 3-D) or k (both are 2-D)."""
    if rows.dim() == 3 and weight.dim() == 2:  # groups split n: (g)(m)(k), (k)(n)
        return 2.0 * math.prod(rows.shape[1:]) * weight.shape[-1]
    return 2.0 * math.prod(rows.shape) * weight.shape[-1]


def _grouped_mm_backward(rows: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> float:
    return 2 * _grouped_mm(rows, weight, out_val=None)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> float:
    """q kᵀ and p v, for q (batch, heads, m, d), k (…, n, d), v (…, n, e); k and v may have fewer heads."""
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **kwargs: Any) -> float:
    """q kᵀ again, then the gradients of p, v, q and k."""
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _convolution_backward(grad: Any, x: Any, weight: Any, *args: Any, out_val: Any, **kwargs: Any) -> float:
    """Each wanted gradient costs as much as forward: each weight once per pixel of the output (transposed: input)."""
    transposed = args[4]
    pixels = math.prod((x if transposed else grad).shape[2:])
    wanted = sum(args[7][:2])  # of the input, of the weight
    return 2.0 * x.shape[0] * pixels * math.prod(weight.shape) * wanted


def _trilinear(*args: Any, out_val: Any, **kwargs: Any) -> float:
    """Three operands, each unsqueezed at its dims and then broadcast: two products and a sum per element of all dims."""
    shapes = []
    for operand, new_dims in zip(args[:3], args[3:6], strict=True):
        shape = list(operand.shape)
        for dim in sorted(new_dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3.0 * math.prod(max(sizes) for sizes in zip(*shapes, strict=True))


_OWN: dict[str, Callable[..., float]] = {
    "aten.convolution_backward": _convolution_backward,
    "flex_attention": _attention,
    "flex_attention_backward": lambda q, k, v, *_, **__: _attention_backward(None, q, k, v),
    "aten.linear": _contraction(0),
    "aten.matmul": _contraction(0),
    "aten.mv": _contraction(0),
    "aten.addmv": _contraction(1),
    "aten.dot": _contraction(0),
    "aten.vdot": _contraction(0),
    "aten._int_mm": _contraction(0),
    "aten._addmm_activation": _contraction(1),
    "aten._trilinear": _trilinear,
    # Of all pairs of rows: subtract, square and add per element.
    "aten._cdist_forward": lambda a, b, *_, out_val, **__: 3.0 * out_val.numel() * a.shape[-1],
    "aten._cdist_backward": lambda grad, a, *_, out_val, **__: 3.0 * grad.numel() * a.shape[-1],
}

_FREE = {"aten._unsafe_view", "aten.empty", "aten.empty_strided", "aten.empty_like", "aten.new_empty"}
# For torch releases that do not tag reductions yet.
_REDUCTIONS = {
    *("sum", "mean", "prod", "any", "all", "amax", "amin", "argmax", "argmin"),
    *("var", "std", "var_mean", "std_mean", "logsumexp"),
}


def _elementwise_flops(node: fx.Node) -> float:
    target = node.target
    packet = str(getattr(target, "overloadpacket", target))
    if target is operator.getitem or getattr(target, "is_view", False) or packet in _FREE:
        return 0.0
    if packet.startswith("_c10d_functional."):  # priced as communication
        return 0.0
    results = _elements(read(SHAPES, node))
    tag = getattr(torch.Tag, "reduction", None)
    if tag in getattr(target, "tags", ()) or packet.rpartition(".")[2] in _REDUCTIONS:
        return float(max([results, *(_elements(read(SHAPES, source)) for source in node.all_input_nodes)]))
    return float(results)


def _elements(specs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.elements for spec in specs)
