"""Arithmetic of dtypes: in which of them a sum may be taken before or after a linear operator."""
from __future__ import annotations

import re

ROUNDED = frozenset(("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"))
"""Types in which arithmetic is exact to rounding, so that a sum may be taken before or after a linear operator."""


def keeps_sums(source: str, target: str) -> bool:
    """True if converting from one dtype to another commutes with a sum, to rounding.

    Truncation to integers does not. Integers wrap: a sum of int8 is one modulo 256, which no wider type and no float knows
    of. A sum of bools is their disjunction, which no other type has. Types of 8 bits saturate.
    """
    if source in ROUNDED or target in ROUNDED:
        return source in ROUNDED and target in ROUNDED
    a, b = (re.fullmatch(r"u?int(\d+)", dtype) for dtype in (source, target))
    if a is None or b is None:
        return source == target == "bool"
    return int(b[1]) <= int(a[1])
