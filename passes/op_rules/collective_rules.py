"""Rules of functional collectives along the dims that they do not move: for loops inside the program of one rank.

They are no part of the table of operators: the planner places no collective, it makes them.
"""
from __future__ import annotations

from torch.fx import Node

from passes.op_rules.base import Rule, make_rule
from passes.op_rules.call_rules import call_of
from passes.op_rules.rule_table import packet_name

POINTWISE = ("all_reduce", "wait_tensor")
MOVES_ROWS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Collectives along dim 0."""


def collective_rule(node: Node) -> Rule | None:
    """The rule of a collective; None for those of several tensors."""
    name, call = packet_name(node.target), call_of(node)
    if name not in (*POINTWISE, *MOVES_ROWS) or len(call.operands) != 1 or len(call.results) != 1:
        return None
    letters: list[int | None] = list(range(len(call.results[0].shape)))
    if name in MOVES_ROWS and letters:
        letters[0] = None
    adds = name in ("wait_tensor", "all_gather_into_tensor", "all_to_all_single") or "sum" in call.args
    return make_rule(call, [letters], [letters], linear=[[0]] if adds else ())
