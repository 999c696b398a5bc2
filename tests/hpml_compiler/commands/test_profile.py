"""`hpml profile`: its messages without ranks, and its output with them."""
from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from hpml_compiler.commands import profile as command
from hpml_compiler.profile.collective_timing import CollectiveTiming
from passes.cost_model.measured.measured_collectives import MeasuredGroup, read_points
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement
from passes.errors import BadInput

GROUP = MeasuredGroup(2, 1, 2, 2, "gloo")
TIMINGS = [
    CollectiveTiming(kind, GROUP, size, (300 + size / 500,) * 3)
    for kind in ("all_reduce", "broadcast") for size in (1024, 4096, 16384, 65536)
]


@pytest.fixture
def app(monkeypatch, tmp_path):
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made = typer.Typer()
    command.register(made)
    return made


@pytest.fixture
def ranks(monkeypatch):
    """As on one rank of two, with the measuring replaced."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("hpml_compiler.runtime.process.world_group.process_group", contextlib.nullcontext)
    monkeypatch.setattr("hpml_compiler.profile.collective_timing.profile_collectives", lambda cache, seconds, sizes: TIMINGS)


@pytest.fixture
def operations(monkeypatch, tmp_path):
    """A target, and the measuring of its operations replaced."""
    found = types.SimpleNamespace(operations={"mm": TimedMeasurement(12.5, 3)}, failed={"sort": "why"},
                                  factors={"pointwise": 1.5}, overheads_us={"launch": 2.0})
    module = types.ModuleType("hpml_compiler.profile.model_profile")
    module.profile_model = lambda model, batch, cache, seconds: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "profiled.py").write_text("import torch\nprint('hello')\n"
                                          "def linear(): return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{tmp_path}/profiled.py:linear"


@pytest.mark.parametrize("arguments", [[], ["--collectives"]])
def test_without_ranks_or_a_target_it_says_how_to_start(app, arguments):
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, BadInput)
    assert "torchrun --nproc-per-node" in result.exception.next_step


@pytest.mark.parametrize("arguments", [[], ["--collectives"]])
def test_one_json_object_with_a_row_for_each_kind(app, ranks, arguments, tmp_path):
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["cache"] == str(tmp_path / "cache" / "measurements.sqlite") and "torch" in found["device"]
    assert [row["kind"] for row in found["collectives"]] == ["all_reduce", "broadcast"]
    row = found["collectives"][0]
    assert (row["size"], row["stride"], row["backend"], row["pieces"]) == (2, 1, "gloo", 1)
    assert row["alpha_us"] == pytest.approx(300) and row["beta_us_per_byte"] == pytest.approx(1 / 500)
    assert row["left_out_error"] == pytest.approx(0, abs=1e-6)
    assert row["measured"][1] == {"bytes": 4096, "median_us": 300 + 4096 / 500, "runs": 3, "spread": 1.0}


def test_the_table_has_alpha_and_beta(app, ranks):
    lines = CliRunner().invoke(app, [], catch_exceptions=False).stdout.splitlines()
    (row,) = [line.split() for line in lines if "all_reduce" in line]
    assert row == ["all_reduce", "2", "1", "300", "0.50", "1", "0.06", "0%"]


def test_only_rank_0_prints(app, ranks, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert CliRunner().invoke(app, [], catch_exceptions=False).stdout == ""


def test_a_target_alone_leaves_the_collectives_out(app, operations):
    result = CliRunner().invoke(app, [operations, "--collectives", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["operations"] == {
        "measured": {"mm": 12.5}, "failed": {"sort": "why"}, "factors": {"pointwise": 1.5}, "overheads_us": {"launch": 2.0}}
    assert "skipping collectives" in result.stderr


def test_what_was_found_of_a_target(app, operations):
    lines = CliRunner().invoke(app, [operations], catch_exceptions=False).stdout.splitlines()
    assert lines[1:4] == ["operations: 1 timed, 1 cannot run alone", "  pointwise: 1.50 times the formula",
                          "  launch: 2.0 us of overhead"]


def test_a_target_on_several_ranks_has_collectives_if_asked_for(app, ranks, operations):
    for arguments, both in [([], False), (["--collectives"], True)]:
        result = CliRunner().invoke(app, [operations, *arguments, "--json"], catch_exceptions=False)
        found = json.loads(result.stdout)
        assert "operations" in found and ("collectives" in found) is both


def _profile(rank: int) -> None:
    command.profile(target=None, collectives=True, seconds=0.01, max_mib=0.0625, model_seconds=1.0, as_json=True)


def test_two_ranks_are_profiled_and_kept(launch, tmp_path, monkeypatch, capfd):
    import torch

    from passes.cost_model.measured.measurement_cache import device_key

    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    launch(_profile, init=False, timeout_s=110)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    found = json.loads(line)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        key = device_key()
    finally:
        torch.set_num_threads(threads)
    points = read_points(MeasurementCache(tmp_path / "measurements.sqlite"), key)
    assert found["device"] == key and len(found["collectives"]) == 6
    assert {p.nbytes for p in points} == {1024, 4096, 16384, 65536}
    assert len(points) == sum(len(row["measured"]) for row in found["collectives"])
