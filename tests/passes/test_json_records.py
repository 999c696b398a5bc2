from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest

from passes.errors import BadInput
from passes.json_records import FrozenMap, from_json, read_json, to_json, write_json


@dataclass(frozen=True)
class Inner:
    size: int
    rates: FrozenMap[str, float] = FrozenMap()


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float
    parts: tuple[Inner, ...] = ()


RECORD = Outer("a", 0.5, (Inner(2, FrozenMap(fast=2.0)), Inner(3)))
JSON = {"name": "a", "ratio": 0.5, "parts": [{"size": 2, "rates": {"fast": 2.0}}, {"size": 3, "rates": {}}]}


def test_record_to_json_and_back():
    assert to_json(RECORD) == JSON
    assert from_json(Outer, JSON, "file") == RECORD
    assert from_json(Outer, {"name": "a", "ratio": 2}, "file") == Outer("a", 2.0)  # defaults; an int stands for a float


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({**JSON, "sise": 1}, "unknown key 'sise' in Outer"),
        ({"name": "a"}, "missing key 'ratio'"),
        ({"name": 3, "ratio": 1.0}, "expected a string, got int 3"),
        ({"name": "a", "ratio": "fast"}, "file: ratio"),
        ({"name": "a", "ratio": True}, "expected a number, got bool"),
        ({"name": "a", "ratio": float("inf")}, "finite"),
        ({"name": "a", "ratio": 1.0, "parts": {}}, "expected an array"),
        ({"name": "a", "ratio": 1.0, "parts": [{"size": 1}, {"size": 1.5}]}, "parts[1]: size"),
        ({"name": "a", "ratio": 1.0, "parts": [{"size": 1, "rates": {"x": None}}]}, "rates: x"),
        ([], "expected an object for Outer"),
    ],
)
def test_from_json_refuses_and_says_where(data, says):
    with pytest.raises(BadInput) as error:
        from_json(Outer, data, "file")
    assert says in str(error.value)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', "{", "\xff"])
def test_read_json_refuses(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match="bad.json"):
        read_json(path)


def test_write_json(tmp_path):
    write_json(JSON, tmp_path / "a.json")
    assert read_json(tmp_path / "a.json") == JSON
    with pytest.raises(ValueError):
        write_json({"a": float("nan")}, tmp_path / "b.json")
    with pytest.raises(BadInput, match="cannot read"):
        read_json(tmp_path / "none.json")


def test_frozen_map_cannot_change_but_travels():
    rates = FrozenMap({"a": 1.0, "b": 2.0})
    assert hash(rates) == hash(FrozenMap({"b": 2.0, "a": 1.0}))
    for change in (lambda: rates.update(c=3.0), lambda: rates.pop("a"), lambda: rates.__setitem__("a", 0.0)):
        with pytest.raises(TypeError):
            change()
    for copied in (pickle.loads(pickle.dumps(rates)), copy.copy(rates), copy.deepcopy(rates)):
        assert copied == rates and type(copied) is FrozenMap
