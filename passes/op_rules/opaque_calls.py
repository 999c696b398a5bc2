"""Calls that the rules cannot look into, and results that come in lists within lists.

A call is opaque if sizes that depend on data go in or come out (`nonzero`), if numbers do (`item`), or if it calls a
graph (`cond`). It is done whole on every rank, exactly as it was traced: neither its arguments nor what is known about
its results may be made anew, since every number that depends on data has a name of its own that later calls refer to.
So are calls that return nothing, such as assertions.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from passes.compat import OpOverload, depends_on_data, pytree
from passes.op_rules.rule_table import has_rule

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def is_opaque(node: Node) -> bool:
    """True if a `call_function` node must be copied as it is, with whole operands."""
    calls_graphs = not isinstance(node.target, OpOverload)
    if calls_graphs and not has_rule(node.target):
        return True  # a higher-order operator whose graphs no rule looks into, or arithmetic on numbers
    leaves = pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
    values = [x.meta.get("val") for x in leaves if isinstance(x, Node) and not (calls_graphs and x.op == "get_attr")]
    parts = [part for _, part in leaves_of(node.meta.get("val")) if part is not None]
    if not any(isinstance(x.meta.get("val"), NUMBERS) for x in node.users):
        # Numbers that nobody reads: kernels of attention on GPUs return the lengths of their operands.
        parts = [part for part in parts if not isinstance(part, NUMBERS)]
    return not parts or not all(map(is_plain, values)) or not all(map(is_plain, parts))


def is_plain(value: Any) -> bool:
    """True for a tensor of static sizes."""
    return isinstance(value, torch.Tensor) and not any(map(depends_on_data, (*value.shape, *value.stride())))


def leaves_of(value: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Results of a call in order: (position, part) of each. The position of a result that is no list is empty."""
    if not isinstance(value, (tuple, list)):
        return [((), value)]
    return [((k, *path), leaf) for k, part in enumerate(value) for path, leaf in leaves_of(part)]


def port_of(node: Node) -> tuple[Node, int] | None:
    """The call whose result a node stands for, through any number of `getitem`, and which of its results that is,
    counted through lists within lists; None for a list of results."""
    path: list[int] = []
    while node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], Node):
        path.insert(0, node.args[1])  # pyright: ignore[reportArgumentType]
        node = node.args[0]
    for port, (position, _) in enumerate(leaves_of(node.meta.get("val"))):
        if position == tuple(path):
            return node, port
    return None
