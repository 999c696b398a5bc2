"""Whether a call draws random numbers, and whether it may run a second time, in backward, in place of keeping what it made."""
from __future__ import annotations

from torch.fx import Node

from passes.op_rules.opaque_calls import is_opaque
from passes.op_rules.rule_table import is_random


def uses_rng(node: Node) -> bool:
    """Whether a call draws random numbers. An attention kernel is marked as random for the dropout that it can do, which most
    calls do not ask for."""
    if not is_random(node.target):
        return False
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True


def is_recomputable(node: Node) -> bool:
    """Whether a second call of the same gives the same, and nothing else happens. A collective may run twice: all ranks have
    the same calls in the same order, those that run once more among them."""
    if is_random(node.target):
        return not uses_rng(node)
    return not (node.is_impure() or is_opaque(node)
                or getattr(getattr(node.target, "_schema", None), "is_mutable", False))
