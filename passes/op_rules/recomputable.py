"""Find calls that draw random numbers, and calls that may be recomputed in backward instead of saving their results."""
from __future__ import annotations

from torch.fx import Node

from passes.op_rules.opaque_calls import is_opaque
from passes.op_rules.rule_table import is_random, operator_of


def uses_rng(node: Node) -> bool:
    """True if a call draws random numbers. An attention kernel is marked as random because of its optional dropout, which most
    calls do not use."""
    if not is_random(node.target):
        return False
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True


def is_recomputable(node: Node) -> bool:
    """True if a second call returns the same and has no other effect. A collective may be recomputed: all ranks have
    the same calls in the same order, including recomputed ones."""
    if operator_of(node.target).recomputable is False:
        return False
    if is_random(node.target):
        return not uses_rng(node)
    return not (node.is_impure() or is_opaque(node)
                or getattr(getattr(node.target, "_schema", None), "is_mutable", False))
