"""A cache that another user may have written, or with foreign content -> not read, one warning, same results."""
from __future__ import annotations

import os
import shutil
import sqlite3
import zlib
from dataclasses import replace
from typing import Any

import pytest

from hpml_compiler.compile.cache.graph_cache import CachedGraph
from hpml_compiler.plans.cache import cache_warnings, graph_database
from passes.serialization import restricted_pickle
from passes.serialization.restricted_pickle import classes_of
from passes.session_state import state
from tests.hpml_compiler.compile.cache.test_graph_cache import FOUND, assert_same, folder, listen
from tests.hpml_compiler.compile.cache.test_graph_cache_on_one_device import CASES, train
from tests.passes.filesystem.test_private_files import OTHER, needs_chown

__all__ = ["folder"]  # a cache of its own for each test
CASE = CASES["microbatches"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """What a launch computes, and the cache that it leaves."""
    cache = tmp_path_factory.mktemp("first") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPML_CACHE", "1")
        patch.setenv("HPML_CACHE_DIR", str(cache))
        seen, *_ = train(*CASE)
        again, found, *_ = train(*CASE)
    assert_same(again, seen)
    assert found, "without harm, the cache is read"
    return seen, cache


@pytest.fixture
def before(first, folder, monkeypatch):
    seen, cache = first
    shutil.copytree(cache, folder)
    monkeypatch.setitem(state._parts, cache_warnings._ReportedCaches, cache_warnings._ReportedCaches())
    return seen


def trained_once_more() -> tuple[list[Any], list[str]]:
    said = listen()
    seen, *_ = train(*CASE)
    assert not any(FOUND in each for each in said)
    return seen, [each for each in said if "not read" in each or "is ignored" in each]


@needs_chown
@pytest.mark.parametrize("which", ["graphs.sqlite", "."])
def test_a_foreign_owner(before, folder, which):
    os.chown(folder / which, OTHER, OTHER)
    seen, said = trained_once_more()
    assert_same(seen, before)
    assert len(said) == 1 and f"{(folder / which).resolve()} belongs to user {OTHER}" in said[0] and "HPML_CACHE_DIR" in said[0]


@pytest.mark.parametrize(("which", "mode"), [("graphs.sqlite", 0o666), (".", 0o777)])
def test_others_may_write(before, folder, which, mode):
    os.chmod(folder / which, mode)
    seen, said = trained_once_more()
    assert_same(seen, before)
    assert len(said) == 1 and "others may write" in said[0]


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", ["the entry", "what running takes", "graphs", "the plan"])
def test_a_foreign_class(before, folder, tmp_path, where):
    trap = Touches(str(tmp_path / "trap"))
    with sqlite3.connect(folder / "graphs.sqlite") as connection:
        for key, packed in connection.execute("SELECT key, entry FROM graph").fetchall():
            entry: Any = restricted_pickle.loads(zlib.decompress(packed), classes_of(CachedGraph))
            hostile = {"the entry": trap, "what running takes": replace(entry, running=trap),
                       "graphs": replace(entry, graphs=restricted_pickle.dumps(trap)),
                       "the plan": replace(entry, unplanned=restricted_pickle.dumps(trap))}[where]
            changed = zlib.compress(restricted_pickle.dumps(hostile))
            new = changed, graph_database._digest(changed), key
            connection.execute("UPDATE graph SET entry = ?, digest = ? WHERE key = ?", new)
    seen, said = trained_once_more()
    assert_same(seen, before)
    assert not (tmp_path / "trap").exists()
    assert len(said) == 1 and "posix.mkdir is none of the classes" in said[0] and "clear-cache" in said[0]
    entry, = (packed for packed, in sqlite3.connect(folder / "graphs.sqlite").execute("SELECT entry FROM graph LIMIT 1"))
    assert b"mkdir" not in zlib.decompress(entry), "it is replaced"
