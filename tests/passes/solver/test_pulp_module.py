"""PuLP is imported -> nothing of the frames that imported it stays."""
from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, weakref
class Local: ...
def imports():
    local = Local()
    {}
    return weakref.ref(local)
found = imports()
gc.collect()
raise SystemExit(found() is not None)
"""


@pytest.mark.parametrize(("statement", "leaves"), [("import pulp", 1), ("import passes.solver.pulp_module", 0)])
def test_an_import_leaves_no_frames(statement, leaves):
    """The first case says when a new PuLP makes the module unnecessary."""
    assert subprocess.run([sys.executable, "-c", SCRIPT.format(statement)]).returncode == leaves
