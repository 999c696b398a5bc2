"""Sizes and roles of a value's dims as text, as plans record them: `16 batch*8192 sequence, 4096 features`."""
from __future__ import annotations

import re
from collections.abc import Sequence

from passes.op_rules.base import Factors

Roles = tuple[tuple[str, ...], ...]
"""Role of each factor of each dim; "" where it has none."""
BATCH_ROLE = "batch"


def format_dims(shape: Sequence[int], factors: Factors, roles: Roles) -> str:
    """Sizes and roles as text, a dim after the other, the factors of a dim joined by "*"; the inverse of `parse_dims`."""
    sizes = (row or (size,) for row, size in zip(factors, shape))
    return ", ".join("*".join(f"{n} {role}".rstrip() for n, role in zip(row, (*own, ""))) for row, own in zip(sizes, roles))


def parse_dims(text: str) -> tuple[tuple[tuple[int, str], ...], ...]:
    """For each dim, size and role of each factor."""
    return tuple(tuple((int(n), role) for n, role in re.findall(r"(\d+) ?([a-z ]*)", dim)) for dim in text.split(", ") if dim)
