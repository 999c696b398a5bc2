"""A value -> its mutable parts, in words."""
from __future__ import annotations

from dataclasses import dataclass

import pytest

from passes.frozen import changeable
from passes.json_records import FrozenMap


@dataclass(frozen=True)
class Holder:
    held: object
    more: int = 0


class Handle:
    def __init__(self, value: object):
        self.value = value


class Problem:
    frozen_by_contract = True

    def __init__(self) -> None:
        self.rows = [1]


@pytest.mark.parametrize("value", [
    1, "a", None, int, len, (1, ("a", None)), frozenset({1}), FrozenMap({"a": (1, 2)}), Holder(FrozenMap({1: Holder("x")})),
    Holder(Problem()),
], ids=["int", "str", "none", "type", "function", "tuple", "frozenset", "map", "dataclass", "by contract"])
def test_what_cannot_change_is_frozen(value):
    assert changeable(value) is None


@pytest.mark.parametrize(("value", "found"), [
    ([], "a list"), (FrozenMap({"a": (1, [2])}), "a list"), (Holder({"a": 1}), "a dict"),
    (((), Holder(Handle([]))), "a Handle, which is equal only to itself"),
], ids=["list", "map", "dataclass", "handle"])
def test_what_can_change_is_found_wherever_it_is(value, found):
    assert changeable(value) == found
