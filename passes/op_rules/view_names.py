"""Operators whose result is their first operand's memory, seen in another shape: the one list of them.

By name, so that it serves graphs and saved plans alike, and needs no torch.
"""
from __future__ import annotations

WHOLE_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "permute", "t", "transpose", "unsqueeze", "squeeze"))
"""Views that have every element of their operand, once."""

VIEWS = WHOLE_VIEWS | {"expand", "slice", "select", "alias", "detach", "split", "split_with_sizes", "unbind", "chunk", "narrow",
                       "diagonal", "as_strided", "getitem"}


def view_name(target: object) -> str:
    """`view` of `aten.view.default`, `getitem` of Python's own function: the names in the sets above."""
    parts = str(target).split(".")
    return parts[1] if len(parts) > 1 else "getitem" if "getitem" in parts[0] else ""
