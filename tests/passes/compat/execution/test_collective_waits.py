"""Waits for collectives -> seen while they are watched; the operator is found in tables, and is as before in the end."""
from __future__ import annotations

import torch

from passes import compat


def test_waits_are_seen_until_the_end():
    overload, seen = torch.ops._c10d_functional.wait_tensor.default, list[object]()
    table, first = {overload: "found"}, overload._op
    undo = compat.watch_waits(lambda: "token", seen.append)
    assert undo is not None
    try:
        assert table[torch.ops._c10d_functional.wait_tensor.default] == "found"
        assert torch.equal(overload(torch.ones(2)), torch.ones(2)) and seen == ["token"]
    finally:
        undo()
    assert overload._op is first and torch.equal(overload(torch.ones(2)), torch.ones(2)) and seen == ["token"]
