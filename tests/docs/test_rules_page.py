"""docs/rules.md: its operators and rules are written out, registered and tested."""
from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest

from passes.op_rules.base import Rule, make_rule
from passes.op_rules.rule_table import OPERATORS, load, rule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
FILES = re.findall(r"^```python\n(# (\S+)\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's files on the import path, each under the name in its first line."""
    load()
    for source, name in FILES:
        (tmp_path / name).write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with OPERATORS.temporary():
        yield
    for _, name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def test_the_pages_tests_pass(page):
    module = importlib.import_module("test_my_ops")
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_every_part_of_a_rule_is_explained():
    text = PAGE.read_text(encoding="utf-8")
    described = {field.name for field in dataclasses.fields(Rule)} - {"inputs", "outputs", "sizes"}
    assert described <= set(make_rule.__kwdefaults__ or {})
    assert not [name for name in (*described, *(rule.__kwdefaults__ or {})) if f"| `{name}` |" not in text]
