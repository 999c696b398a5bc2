"""FLOPs: floating point operations of every call, a multiply-add counted as two.

Products of matrices, convolutions and attention are counted by the formulas of `torch.utils.flop_counter`, or by those in the
table of operators (`passes.op_rules`) where torch has none (CPU attention, grouped matmul) or one that is off. As in torch,
causal attention counts as full attention. Everything else costs one per element of the output, or what the table says;
views and collectives cost nothing.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes.analyses.shapes import SHAPES, Shapes
from passes.annotations import Key, read, write
from passes.base import AnalysisPass
from passes.compat import pytree, size_hint
from passes.graph.fx_nodes import arguments_of, constants_of, is_collective
from passes.op_rules.rule_table import operator_of
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
    if any(isinstance(x, torch.SymInt) for each in told if not isinstance(value := each.meta.get("val"), torch.Tensor)
           for x in pytree.tree_leaves(value)):
        return node_flops(node)  # depends on more than shapes
    key = node.target, constants_of(node), tuple(read(SHAPES, each) for each in told)
    if key not in known:
        known[key] = node_flops(node)
    return known[key]


def has_formula(target: Any) -> bool:
    """True if calls of an operator are counted by a formula rather than per element."""
    return callable(_formula(target))


def node_flops(node: fx.Node) -> float:
    """FLOPs of one call, from the shapes annotated on it and its inputs."""
    formula = _formula(node.target)
    if not callable(formula):
        return _elementwise_flops(node, 1.0 if formula is None else formula)
    args, kwargs = fx.map_arg((node.args, node.kwargs), _as_traced)  # pyright: ignore[reportGeneralTypeIssues]
    try:
        return float(formula(*args, **kwargs, out_val=_as_traced(node)))
    except Exception as error:  # a formula for other arguments than these must not stop the compilation
        _log.warning("FLOPs of %s counted as one per element, its formula failed: %r", node.format_node(), error)
        return _elementwise_flops(node, 1.0)


def _as_traced(node: fx.Node) -> Any:
    """Result of the node as traced, with meta tensors of static sizes: formulas may compare sizes."""
    specs = iter(read(SHAPES, node))

    def stand_in(value: torch.Tensor | torch.SymInt) -> torch.Tensor | int:
        if isinstance(value, torch.SymInt):
            return size_hint(value, Shapes.unbacked_size)
        spec = next(specs)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    return pytree.tree_map_only((torch.Tensor, torch.SymInt), stand_in, node.meta.get("val"))


def _formula(target: Any) -> Callable[..., float] | float | None:
    """A formula, or a number for each element of the output."""
    known = operator_of(target)
    if known.flops is None and (known.view or getattr(target, "is_view", False) or is_collective(target)):
        return 0.0  # collectives are priced as communication
    return flop_registry.get(getattr(target, "overloadpacket", target)) if known.flops is None else known.flops


def _elementwise_flops(node: fx.Node, each: float) -> float:
    return each * sum(spec.elements for spec in read(SHAPES, node))
