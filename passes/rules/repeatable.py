"""Whether a call may run a second time, in backward, in place of keeping what it made."""
from __future__ import annotations

from torch.fx import Node

from passes.rules.opaque import is_opaque
from passes.rules.table import is_random, rule_of


def is_repeatable(node: Node) -> bool:
    """Whether a second call of the same gives the same, and nothing else happens. A collective may run twice: all ranks have
    the same calls in the same order, those that run once more among them."""
    if is_random(node.target):
        # An attention kernel is marked as random for the dropout that it can do; a call that does none has a rule.
        return "attention" in str(node.target) and rule_of(node) is not None
    return not (node.is_impure() or is_opaque(node)
                or getattr(getattr(node.target, "_schema", None), "is_mutable", False))
