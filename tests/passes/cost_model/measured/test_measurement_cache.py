"""Measurements persist, with concurrent writers, and an error for a broken file gives the next step."""
from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
import torch

from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement, default_path, device_key
from passes.errors import BadInput


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "cache.sqlite"


def test_what_is_put_is_got_by_another_reader(path):
    one = TimedMeasurement(12.5, 7, 1.3, {"shape": [2, 3], "dtype": "float32"})
    with MeasurementCache(path) as cache:
        cache.put("cpu", "op", "mm", one)
        cache.put("cpu", "op", "add", TimedMeasurement(1.0, 1))
        cache.put("cpu", "collective", "mm", TimedMeasurement(2.0, 1))
        cache.put("gpu", "op", "mm", TimedMeasurement(3.0, 1))
    with MeasurementCache(path) as cache:
        assert cache.get("cpu", "op", "mm") == one
        assert cache.get("cpu", "op", "bmm") is None
        assert cache.all("cpu", "op") == {"add": TimedMeasurement(1.0, 1), "mm": one}
        assert cache.all("tpu", "op") == {}


def test_a_later_measurement_replaces_the_earlier(path):
    cache = MeasurementCache(path)
    cache.put("cpu", "op", "mm", TimedMeasurement(1.0, 3))
    cache.put("cpu", "op", "mm", TimedMeasurement(2.0, 5))
    assert cache.all("cpu", "op") == {"mm": TimedMeasurement(2.0, 5)}


def test_reading_where_nothing_was_measured_makes_no_file(path):
    cache = MeasurementCache(path)
    assert cache.get("cpu", "op", "mm") is None and cache.all("cpu", "op") == {}
    assert not path.parent.exists()


def test_many_are_put_together_or_not_at_all(path):
    cache = MeasurementCache(path)
    cache.put_all("cpu", "op", {"a": TimedMeasurement(1.0, 1), "b": TimedMeasurement(2.0, 1)})
    with pytest.raises(TypeError):
        cache.put_all("cpu", "op", {"c": TimedMeasurement(1.0, 1), "d": TimedMeasurement(1.0, 1, 1.0, {"bad": object()})})
    assert list(cache.all("cpu", "op")) == ["a", "b"]


def _write(path: Path, writer: int) -> None:
    with MeasurementCache(path) as cache:
        for k in range(20):
            cache.put("cpu", "op", f"{writer}-{k}", TimedMeasurement(float(k), 1))


def test_processes_write_at_once(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, w)) for w in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(MeasurementCache(path).all("cpu", "op")) == 80


@pytest.mark.parametrize("use", [
    lambda cache: cache.get("cpu", "op", "mm"),
    lambda cache: cache.all("cpu", "op"),
    lambda cache: cache.put("cpu", "op", "mm", TimedMeasurement(1.0, 1)),
])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, use):
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(BadInput) as error:
        use(MeasurementCache(path))
    assert str(path) in error.value.where and "delete this file" in error.value.next_step


def test_a_damaged_row_is_named_with_what_to_do(path):
    MeasurementCache(path).put("cpu", "op", "mm", TimedMeasurement(1.0, 1))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurement SET extra = '{'")
    with pytest.raises(BadInput) as error:
        MeasurementCache(path).get("cpu", "op", "mm")
    assert str(path) in error.value.where and "delete this file" in error.value.next_step


def test_a_file_of_another_version_is_refused(path):
    MeasurementCache(path).put("cpu", "op", "mm", TimedMeasurement(1.0, 1))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(BadInput, match="version 99"):
        MeasurementCache(path).get("cpu", "op", "mm")


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput) as error:
        MeasurementCache(tmp_path / "file" / "cache.sqlite").put("cpu", "op", "mm", TimedMeasurement(1.0, 1))
    assert "HPML_CACHE_DIR" in error.value.next_step


@pytest.mark.parametrize(("environment", "expected"), [
    ({"HPML_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/measurements.sqlite"),
    ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/hpml/measurements.sqlite"),
    ({"HOME": "/c"}, "/c/.cache/hpml/measurements.sqlite"),
])
def test_the_folder_comes_from_the_environment(monkeypatch, environment, expected):
    for name in ("HPML_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_path() == Path(expected) == MeasurementCache().path


def test_the_device_key_tells_threads_and_torch_apart():
    key, threads = device_key(), torch.get_num_threads()
    assert torch.__version__.split("+")[0] in key and f"{threads} threads" in key
    torch.set_num_threads(threads + 1)
    try:
        assert device_key() != key
    finally:
        torch.set_num_threads(threads)
    assert device_key() == key


@pytest.mark.parametrize("values", [(-1.0, 1, 1.0), (float("nan"), 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.5)])
def test_impossible_measurements_are_refused(values):
    with pytest.raises(ValueError, match="must be"):
        TimedMeasurement(*values)
