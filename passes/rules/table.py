"""The table of op rules: which function gives the rule of an operator.

A family (a file beside this one) registers its functions with `@rule(op, ...)`; operators that torch tags pointwise
need no entry. `rule_of(node)` reads the call off an FX node and asks the table.
"""
from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from passes.compat import OpOverload, pytree
from passes.rules.base import Call, Operand, Rule, RuleFunction, Spec

log = logging.getLogger("hpml.rules")
FAMILIES = ("attention", "convolution", "creation", "embedding", "matmul", "pointwise", "reductions", "routing", "views")
_table: dict[Any, RuleFunction] = {}
_heavy: set[Any] = set()


def rule(*targets: Any, heavy: bool = False) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for operators. `heavy` marks those whose work is worth a decision of its own
    (matrix products, attention, table look-ups): others are clustered with their neighbors."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _table:
                raise ValueError(f"two rules for {target}")
            _table[target] = function
        if heavy:
            _heavy.update(targets)
        return function

    return register


@cache
def load() -> None:
    for family in FAMILIES:
        importlib.import_module(f"passes.rules.{family}")


def targets() -> tuple[Any, ...]:
    """All operators with an entry, in no particular order."""
    load()
    return tuple(_table)


def _lookup(target: Any) -> RuleFunction | None:
    """An operator that another package registers, maybe after this table is loaded, stands in it by name."""
    return _table.get(target) or (_table.get(target.name()) if isinstance(target, OpOverload) else None)


def is_heavy(target: Any) -> bool:
    load()
    return target in _heavy or (isinstance(target, OpOverload) and target.name() in _heavy)


def has_rule(target: Any) -> bool:
    load()
    return _lookup(target) is not None or is_pointwise(target)


def is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def spec_of(value: Any) -> Spec:
    """Spec of a tensor (fake ones too); sizes must be plain integers."""
    return Spec(tuple(int(s) for s in value.shape), str(value.dtype).removeprefix("torch."), value.dtype.itemsize)


def results_of(node: Node) -> list[Any]:
    """Tensors that a node returns; None entries of a tuple are dropped."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def operand_nodes(node: Node) -> list[Node]:
    """Nodes among the arguments that stand for tensors, in the order of tree_leaves; a node may occur twice."""
    leaves = pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
    return [x for x in leaves if isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor)]


def call_of(node: Node) -> Call:
    """The call that a `call_function` node makes, with `Operand(i)` in place of its tensor arguments."""
    operands = operand_nodes(node)
    order = iter(range(len(operands)))

    def swap(x: Any) -> Any:
        return Operand(next(order)) if isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor) else x

    args, kwargs = pytree.tree_map(swap, (node.args, dict(node.kwargs)), is_leaf=lambda x: isinstance(x, Node))
    return Call(
        target=node.target,
        args=tuple(args),
        kwargs=kwargs,
        operands=tuple(spec_of(n.meta["val"]) for n in operands),
        results=tuple(spec_of(v) for v in results_of(node)),
        strides=tuple(tuple(n.meta["val"].stride()) for n in operands),
    )


def rule_of_call(call: Call) -> Rule | None:
    load()
    function = _lookup(call.target)
    if function is None and is_pointwise(call.target):
        from passes.rules.pointwise import pointwise as function
    return None if function is None else function(call)


def rule_of(node: Node) -> Rule | None:
    """Rule of a node, or None if its operator has none (it is then left whole)."""
    return rule_of_call(call_of(node))
