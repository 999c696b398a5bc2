"""Repeated cache failures -> one warning per cause and process."""
from __future__ import annotations

import logging

import pytest

from hpml_compiler.plans.cache import cache_warnings, graph_database, plan_database
from passes.cost_model.measured.measurement_cache import MeasurementCache
from passes.errors import BadInput
from passes.session_state import state


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setitem(state._parts, cache_warnings._ReportedCaches, cache_warnings._ReportedCaches())
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "file" / "cache"))


def all_caches(caplog) -> list[str]:
    """Everything that a launch reads and keeps, three times; what is warned of."""
    def measured():
        with MeasurementCache() as cache:
            cache.check_writable()

    with caplog.at_level(logging.DEBUG, "hpml"):
        for _ in range(3):
            for use in (lambda: plan_database.get("x"), lambda: plan_database.put("x", ""), lambda: graph_database.get("x"),
                        lambda: graph_database.put("x", b""), measured):
                try:
                    use()
                except BadInput as error:
                    cache_warnings.warn_of_cache("something cannot be kept", error)
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_that_cannot_be_written_is_warned_of_once(caplog, tmp_path):
    (tmp_path / "file").write_text("")
    (said,) = all_caches(caplog)
    assert "something cannot be kept: cannot use the" in said and "HPML_CACHE_DIR" in said
    assert len(caplog.messages) > 1, "the rest is there for debugging"


def test_each_damaged_file_is_warned_of_once(caplog, tmp_path):
    (tmp_path / "file" / "cache").mkdir(parents=True, mode=0o700)
    for name in ("plans.sqlite", "graphs.sqlite"):
        (tmp_path / "file" / "cache" / name).write_bytes(b"nothing of that kind" * 100)
    said = all_caches(caplog)
    assert len(said) == 2 and all("damaged" in each for each in said)
