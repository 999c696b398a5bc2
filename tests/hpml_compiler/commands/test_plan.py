"""`hpml plan` and `hpml explain`, with the planner replaced by one that returns a plan made by hand."""
from __future__ import annotations

import json
import os
import shutil
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

import hpml_compiler
from hpml_compiler.commands import explain as explain_command
from hpml_compiler.commands import plan as plan_command
from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from passes.errors import BadInput, Infeasible, MissingDependency
from tests.helpers.plans import gpt_plan

TARGET = """
import os, torch
def mlp():
    print("hello from the model")
    os.write(1, b"hello from C\\n")
    return torch.nn.Linear(4, 2), {"input": torch.zeros(3, 4)}
"""


@pytest.fixture
def app():
    made = typer.Typer()
    plan_command.register(made)
    explain_command.register(made)
    return made


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / "cli_target.py").write_text(TARGET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{tmp_path}/cli_target.py:mlp"


@pytest.fixture
def calls(monkeypatch):
    """The arguments that the planner was called with."""
    made: list[dict] = []

    def planner(model, batch, *, cluster=None, **options):
        made.append({"model": type(model).__name__, "batch": list(batch), "cluster": cluster, **options})
        return gpt_plan()

    api = types.ModuleType("hpml_compiler.api")
    api.plan = planner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpml_compiler.api", api)
    monkeypatch.setattr(hpml_compiler, "api", api, raising=False)
    return made


def test_table_on_stdout(app, target, calls):
    result = CliRunner().invoke(app, ["plan", target])
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip() == gpt_plan().table()
    assert "hello from the model" in result.stderr
    assert calls == [{"model": "Linear", "batch": ["input"], "cluster": None}]


def test_one_json_object_on_stdout(app, target, calls):
    result = CliRunner().invoke(app, ["plan", target, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    memory = found.pop("memory")
    assert found.pop("copies_bytes") == found.pop("low_rank_bytes") == 0
    assert found == gpt_plan().summary_json()
    assert memory["peak_bytes"] == sum(memory["parts"].values()) and not memory["counted"]


def test_prints_below_python_stay_off_stdout(app, target, calls, capfd):
    app(["plan", target, "--json"], standalone_mode=False)
    out, err = capfd.readouterr()
    assert gpt_plan().summary_json().items() <= json.loads(out).items()
    assert "hello from C" in err and "hello from the model" in err
    os.write(1, b"stdout is back\n")
    assert capfd.readouterr().out == "stdout is back\n"


def test_options_reach_the_planner(app, target, calls):
    result = CliRunner().invoke(app, [
        "plan", target, "--cluster", "8x8:h100-80g", "--fix", "dp=2", "--fix", "tp=32", "--fix", "compiler=eager",
        "--memory-budget", "24GiB", "--solver", "PULP_CBC_CMD", "--time-limit", "5", "--gap", "0.01"])
    assert result.exit_code == 0, result.output
    assert calls == [{
        "model": "Linear", "batch": ["input"], "cluster": "8x8:h100-80g", "mesh": {"dp": 2, "tp": 32},
        "compiler": "eager", "memory_budget": "24GiB", "solver": "PULP_CBC_CMD", "time_limit": 5.0, "gap": 0.01}]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--fix", "memory_budget=1GB", "--memory-budget", "2GB"], "memory_budget is given twice"),
    (["--fix", "cluster=1x2:cpu", "--cluster", "1x4:cpu"], "cluster is given twice"),
    (["--memory-budget", "lots"], "'lots' is not a number of bytes"),
    (["--gap", "-1"], "gap"),
])
def test_bad_options_stop_before_the_model_is_loaded(app, calls, arguments, message):
    result = CliRunner().invoke(app, ["plan", "no_such_file.py:f", *arguments])
    assert isinstance(result.exception, BadInput) and message in str(result.exception)
    assert not calls and not result.stdout


def test_bad_target(app, calls):
    result = CliRunner().invoke(app, ["plan", "no_such_file.py:f"])
    assert isinstance(result.exception, BadInput) and "no file no_such_file.py" in str(result.exception)


def test_save_and_explain(app, target, calls, tmp_path):
    path = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", target, "--save", str(path)])
    assert result.exit_code == 0 and Plan.load(path) == gpt_plan()
    result = CliRunner().invoke(app, ["explain", str(path), "proj_1"])
    assert result.exit_code == 0 and result.stdout == gpt_plan().explain("proj_1", 80) + "\n"
    result = CliRunner().invoke(app, ["explain", str(path), "--memory"])
    assert result.exit_code == 0 and "peak memory of a device" in result.stdout and "parameters" in result.stdout
    result = CliRunner().invoke(app, ["explain", str(path), "proj_1", "--memory"])
    assert isinstance(result.exception, BadInput) and "a whole plan" in result.exception.what
    result = CliRunner().invoke(app, ["explain", str(path), "prj_1"])
    assert isinstance(result.exception, BadInput) and "proj_1" in result.exception.next_step
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "none.json"), "proj_1"])
    assert isinstance(result.exception, BadInput)


def test_missing_dot_loses_nothing_else(app, target, calls, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["plan", target, "--json", "--save", str(tmp_path / "p.json"), "--svg",
                                      str(tmp_path / "p.svg")])
    assert isinstance(result.exception, MissingDependency)
    assert json.loads(result.stdout) and Plan.load(tmp_path / "p.json") == gpt_plan()
    assert (tmp_path / "p.gv").exists()


def test_unlike_devices_are_planned_saved_and_printed(app, target, tmp_path):
    path, cluster = tmp_path / "mixed.json", "1x1:h100-80g+1x1:v100-32g"
    result = CliRunner().invoke(app, ["plan", target, "--cluster", cluster, "--json", "--save", str(path)])
    assert result.exit_code == 0, result.output
    saved = MixedPlan.load(path)
    assert json.loads(result.stdout) == saved.summary_json()
    assert sum(group["rows"] for group in saved.summary_json()["groups"]) == saved.batch == 3
    result = CliRunner().invoke(app, ["explain", str(path), "weight"])
    assert isinstance(result.exception, BadInput) and "groups of different devices" in str(result.exception)


@pytest.mark.parametrize(("arguments", "error"), [
    (["--view", "map", "--svg", "plan.svg"], "there is no view map"), (["--view", "block"], "--view needs a picture"),
    (["--html", "no/such/plan.html"], "the page of the plan"), (["--backward"], "--backward needs a picture"),
])
def test_pictures_and_pages_are_checked_before_the_model_is_loaded(app, arguments, error, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "not_there.py:model", *arguments])
    assert isinstance(result.exception, BadInput) and error in str(result.exception)


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")
def test_a_view_and_a_page_are_written(app, target, calls, tmp_path):
    result = CliRunner().invoke(app, ["plan", target, "--json", "--html", str(tmp_path / "plan.html"),
                                      "--svg", str(tmp_path / "plan.svg"), "--view", "block", "--backward"])
    assert result.exit_code == 0, result.output
    assert "block " in (tmp_path / "plan.svg").read_text() and "How to make it again" in (tmp_path / "plan.html").read_text()


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")
def test_a_plan_that_does_not_fit_is_drawn_and_refused(app, target, calls, tmp_path, monkeypatch):
    error = Infeasible("a device needs 115 GiB, more than its 79.1 GiB")
    error.plan = gpt_plan()

    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(hpml_compiler.api, "plan", refuse)
    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(app, ["plan", target, "--svg", str(drawn)])
    assert result.exception is error and "</svg>" in drawn.read_text()
    assert "plan.svg shows the plan that does not fit" in result.stderr
    monkeypatch.setenv("PATH", "")
    without = CliRunner().invoke(app, ["plan", target, "--svg", str(drawn)])
    assert without.exception is error and "dot" in without.stderr
