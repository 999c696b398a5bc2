"""Unreadable measurements -> a warning and estimated costs; an error with costs="measured"."""
from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hpml_compiler
from hpml_compiler.options import Options
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.plans.cache import cache_warnings
from passes.cost_model.measured.measured_collectives import KIND
from passes.cost_model.measured.measured_kernels import FACTOR, OPERATION
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement, device_key
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.session_state import state


def damaged(folder: Path) -> None:
    folder.joinpath("measurements.sqlite").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)


def of_another_version(folder: Path) -> None:
    with MeasurementCache() as cache:
        cache.put("cpu", "op", "mm", TimedMeasurement(1.0, 1))
        cache.guarded(lambda: cache._open().execute("PRAGMA user_version = 99"))


def with_a_collective_without_size(folder: Path) -> None:
    with MeasurementCache() as cache:
        cache.put(device_key("cpu"), KIND, "all_reduce", TimedMeasurement(1.0, 1))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(state._parts, cache_warnings._ReportedCaches, cache_warnings._ReportedCaches())
    return tmp_path


def loaded(**options):
    return measured_costs.load(Options.parse(options or None), Cluster.local(1, "cpu"))


@pytest.mark.parametrize("harm", [damaged, of_another_version, with_a_collective_without_size])
def test_it_costs_a_warning_and_no_run(harm, folder, caplog):
    nothing = measured_costs.digest(Options.parse(None), Cluster.local(1, "cpu"), "")
    harm(folder)
    with caplog.at_level(logging.WARNING, "hpml"):
        assert loaded() is None and loaded() is None
    assert measured_costs.digest(Options.parse(None), Cluster.local(1, "cpu"), "") == nothing
    (said,) = caplog.messages
    assert "costs are estimated" in said and str(folder) in said and "next step" in said
    with pytest.raises(BadInput, match="measurement cache"):
        loaded(costs="measured")


def test_so_does_a_folder_that_cannot_be_looked_into(monkeypatch, folder, caplog):
    """As one that belongs to somebody else, for which tests that run as root have this."""
    monkeypatch.setenv("HPML_CACHE_DIR", str(folder / ("long" * 100)))
    assert loaded() is None
    assert "costs are estimated" in caplog.text and "HPML_CACHE_DIR" in caplog.text
    with pytest.raises(BadInput, match="cannot use the measurement cache"):
        loaded(costs="measured")


def test_what_can_be_read_is_taken_without_a_word(folder, caplog):
    with MeasurementCache() as cache:
        cache.put(measured_costs.sharing_key("cpu", 1), OPERATION, "mm", TimedMeasurement(1.0, 1))
    found = loaded()
    assert found is not None and found.measurements.operations == {"mm": 1.0} and not caplog.messages


def test_given_devices_that_are_not_the_ones_here_cost_what_their_data_sheet_says(folder):
    with MeasurementCache() as cache:
        cache.put(measured_costs.sharing_key("cpu", 1), FACTOR, "matmul", TimedMeasurement(1000.0, 1))
    here, x = Cluster.local(1, "cpu"), torch.ones(4, 4)
    other = Cluster((replace(here.group, device=replace(here.group.device, memory_bandwidth_bytes_per_s=1e9)),))

    def step_us(cluster, **options):
        return hpml_compiler.plan(torch.nn.Linear(4, 4), x, cluster, **options).predicted.step_time_us

    assert step_us(other) == step_us(other, costs="roofline") < step_us(other, costs="measured")
    assert step_us(here) == step_us(here, costs="measured") > step_us(here, costs="roofline")
