"""Old import paths that were documented -> the same modules as under their new paths, and a warning."""
from __future__ import annotations

import importlib
import sys

import pytest

from passes.moved_modules import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_import_the_same_module(old, monkeypatch):
    new = importlib.import_module(MOVED[old])
    spec = new.__spec__
    for name in MOVED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is {MOVED[old]} now"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is spec and sys.modules[MOVED[old]] is new
