"""`hpml doctor`: its report here, and with something missing."""
from __future__ import annotations

import importlib.metadata
import json
import sys

import psutil
import pulp
import pytest

from hpml_compiler import cli
from hpml_compiler.commands import _checks
from hpml_compiler.plans.cache import graph_database, plan_database


def _doctor(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    return int(exit.value.code or 0), captured.out, captured.err


def test_a_full_installation_passes(capsys):
    code, out, err = _doctor(capsys, "--quick", "--json")
    report = json.loads(out)
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert (code, report["ok"]) == (0, True), err
    assert {"python", "torch", "packages", "HiGHS", "backend", "C++ compiler", "CPU", "gloo"} <= status.keys()
    assert "all_reduce" not in status  # --quick


def test_the_table_shows_remedies_as_they_are_typed(capsys, monkeypatch):
    monkeypatch.setattr(pulp, "listSolvers", lambda onlyAvailable: ["PULP_CBC_CMD"])
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = _doctor(capsys, "--quick")
    assert code == 4
    assert "pip install 'pulp[highs]'" in out and "pip install 'pulp[highs]'" in err and "HiGHS" in err


def test_a_torch_out_of_range_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [
        "torch>=99", "psutil", "nowhere-to-be-found>=1", "also-not-here; extra == 'test'"])
    torch, packages = _checks.check_requirements()
    assert (torch.status, torch.next_step) == ("missing", "pip install 'torch>=99'")
    assert packages.status == "missing" and packages.next_step == "pip install 'nowhere-to-be-found>=1'"


def test_without_dot_there_is_only_a_warning(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _checks.check_dot().status == "warning"
    assert "apt-get install graphviz" in _checks.check_dot().next_step


def test_without_a_compiler_inductor_cannot_work(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert _checks.check_compiler().status == "missing"


@pytest.mark.parametrize(("entries", "said"), [
    ([], "no entry point"),
    ([importlib.metadata.EntryPoint("hpml", "nowhere.to_be:found", _checks.BACKEND_GROUP)], "ModuleNotFoundError"),
])
def test_a_backend_that_torch_would_not_find_is_missing(monkeypatch, entries, said):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    check = _checks.check_backend()
    assert check.status == "missing" and said in check.detail


def test_two_gloo_ranks_agree():
    assert _checks.check_all_reduce() == _checks.Check("all_reduce", "ok", "two gloo ranks agree")


def test_ranks_that_never_finish_are_ended(monkeypatch):
    monkeypatch.setattr(_checks, "SMOKE_LIMIT_S", 0.5)
    before = set(psutil.Process().children(recursive=True))
    assert "did not finish within 0.5 s" in _checks.check_all_reduce().detail
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_failing_all_reduce_shows_its_error(monkeypatch):
    monkeypatch.setattr(_checks, "SMOKE_MODULE", "hpml_compiler.commands.not_there")
    check = _checks.check_all_reduce()
    assert check.status == "missing" and "not_there" in check.detail
    assert sys.executable in check.next_step


def test_plans_of_earlier_launches_are_forgotten(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    assert "the cache is empty" in _doctor(capsys, "--clear-cache")[1]
    plan_database.put("key", "{}")
    graph_database.put("key", b"a graph")
    code, out, _ = _doctor(capsys, "--clear-cache", "--json")
    assert (code, json.loads(out)) == (0, {"cleared": [str(tmp_path / f"{each}.sqlite") for each in ("plans", "graphs")]})
    assert plan_database.get("key") is None and graph_database.get("key") is None
    assert "the cache is empty" in _doctor(capsys, "--clear-cache")[1]
    plan_database.put("key", "{}")
    assert _doctor(capsys, "--clear-cache")[1] == f"emptied {tmp_path / 'plans.sqlite'}\n"
    code, _, err = _doctor(capsys, "--clear-cache", "--cluster")
    assert code == 2 and "cannot be combined" in err
