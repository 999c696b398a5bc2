"""Byte quantities as text -> numbers, or an error."""
from __future__ import annotations

import pytest

from hpml_compiler.units import parse_bytes


@pytest.mark.parametrize(("text", "size"), [
    (1000, 1000), ("1000", 1000), ("64MiB", 64 * 2**20), ("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("2 kb", 2000),
    ("1TiB", 2**40),
])
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["24G", "GB", "-1GB", "1e9", "", "nan", True, 1.5, 0, -5, None, "0.0001KB"])
def test_no_bytes(text):
    with pytest.raises(ValueError, match=r"not a number of bytes|less than one byte"):
        parse_bytes(text)
