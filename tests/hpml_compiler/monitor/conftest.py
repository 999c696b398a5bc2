"""The tests of warnings count in microseconds: here no step is too short to be warned of."""
from __future__ import annotations

import pytest

from hpml_compiler.monitor import report


@pytest.fixture(autouse=True)
def steps_of_any_length(monkeypatch):
    monkeypatch.setattr(report, "SHORT_US", 0.0)
