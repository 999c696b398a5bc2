"""docs/writing_a_pass.md: its files are written out, imported and run."""
from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from passes import registry
from passes.base import PassError
from passes.manager import PassManager

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing_a_pass.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's Python files on the import path, each under the name in its first line."""
    registry.names()  # or what is found while the page is there would be forgotten with it
    for block in _blocks("python"):
        path = tmp_path / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with registry.PASSES.temporary():
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_passes", "test_my_passes")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_page_stays_small():
    code = [line for block in _blocks("python") for line in block.splitlines() if line.strip()]
    assert len(code) < 60, f"{len(code)} lines of code"


def test_the_pages_tests_pass(page):
    module = importlib.import_module("test_my_passes")
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
    assert {"bytes_moved", "drop_aliases"} <= set(registry.names())


def test_the_error_on_the_page_is_the_one_that_is_raised(page):
    module = importlib.import_module("test_my_passes")
    with pytest.raises(PassError) as raised:
        PassManager((module.DropAliases(), module.BytesMoved())).check()
    assert str(raised.value) + "\n" == _blocks("text")[0]


def test_the_entry_points_name_the_passes(page):
    entries = re.findall(r'^(\w+) = "(.+)"$', _blocks("toml")[0], re.MULTILINE)
    assert len(entries) == 2
    for name, value in entries:
        assert EntryPoint(name, value, registry.ENTRY_POINT_GROUP).load().name == name
