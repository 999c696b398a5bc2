"""`hpml demo`: an ordinary script, a launcher that reads the ranks' output, and the files that a run leaves."""
from __future__ import annotations

import ast
import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from hpml_compiler.commands import _checks
from hpml_compiler.commands import demo as command
from hpml_compiler.demo import loss_plot, training_runs
from hpml_compiler.plan_api.model_plan import Plan
from passes.errors import BadInput, HpmlError
from tests.helpers.plans import gpt_plan

TEXT = training_runs.SCRIPT.with_name("persuasion.txt")


def a_run(ranks: int, *curve: float) -> training_runs.TrainingRun:
    return training_runs.TrainingRun(ranks, 1000, tuple((loss,) * ranks for loss in curve), first_step_s=1.0, step_s=0.1)


def test_the_script_knows_hpml_by_the_name_of_the_backend_only():
    tree = ast.parse(training_runs.SCRIPT.read_text(encoding="utf-8"))
    imported = {name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "argparse", "json", "pathlib", "torch"}
    assert "distributed" not in ast.unparse(tree)
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "hpml"]
    assert len(named) == 1


def test_the_text_is_small_ascii_and_its_source_is_named():
    text = TEXT.read_bytes()
    assert text.isascii() and len(text) <= 1_000_000
    note = TEXT.with_name("SOURCE.txt").read_text(encoding="utf-8")
    assert f"{len(text):,} bytes" in note and "public domain" in note


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Puts another script in the place of the training script."""

    def put(source: str) -> None:
        path = tmp_path / "script.py"
        path.write_text(source)
        monkeypatch.setattr(training_runs, "SCRIPT", path)

    return put


def test_losses_are_read_even_where_ranks_share_a_line(script):
    script("print('parameters 12\\nparameters 12')\n"
           "print('step 1 loss 2.50000000', end='')\n"
           "print('step 1 loss 2.50000001\\n\\nstep 2 loss 1.25000000\\nwarning\\nstep 2 loss 1.25000000')\n")
    seen = []
    run = training_runs.run_training(1, [], {}, lambda step, loss: seen.append((step, loss)))
    assert seen == [(1, 2.5), (2, 1.25)]
    assert run.losses == ((2.5, 2.50000001), (1.25, 1.25))
    assert (run.parameters, run.curve) == (12, (2.5, 1.25))


def test_the_environment_reaches_the_script(script):
    script("import os; print('parameters', os.environ['EXTRA']); "
           "print(f\"step 1 loss {float(os.environ['OMP_NUM_THREADS']):.8f}\")")
    run = training_runs.run_training(1, [], {"EXTRA": "7"}, lambda step, loss: None)
    assert (run.parameters, run.losses) == (7, ((1.0,),))


def test_a_script_that_fails_shows_its_last_lines(script):
    script("print('step 1 loss 2.50000000')\nraise SystemExit('no such text')")
    with pytest.raises(HpmlError, match="exit code 1") as raised:
        training_runs.run_training(1, [], {}, lambda step, loss: None)
    assert "no such text" in raised.value.what


def test_difference_is_that_of_the_worst_rank():
    many = training_runs.TrainingRun(2, 1000, ((2.0, 2.0), (1.0, 1.1)), 1.0, 0.1)
    assert training_runs.largest_difference(a_run(1, 2.0, 1.0), many) == pytest.approx(0.1)
    assert training_runs.largest_difference(a_run(1, 2.0, 1.0), a_run(2, 2.0, math.nan)) == math.inf


@pytest.mark.parametrize("many", [a_run(2, 2.0), training_runs.TrainingRun(2, 1000, ((2.0, 2.0), (1.0,)), 1.0, 0.1)])
def test_a_rank_that_left_out_a_step_is_an_error(many):
    with pytest.raises(HpmlError, match="printed"):
        training_runs.largest_difference(a_run(1, 2.0, 1.0), many)


def test_both_curves_are_drawn(tmp_path):
    loss_plot.draw(a_run(1, 2.0, 1.0), a_run(2, 2.0, 1.0), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("last", "agrees"), [(1.00001, True), (1.01, False), (math.nan, False)])
def test_losses_that_differ_are_an_error(tmp_path, monkeypatch, capsys, last, agrees):
    def train(ranks, arguments, environment, on_step):
        if ranks > 1:
            gpt_plan().save(environment["HPML_SAVE_PLAN"])
        on_step(1, 2.0)
        return a_run(2, 2.0, last) if ranks > 1 else a_run(1, 2.0, 1.0)

    monkeypatch.setattr(training_runs, "run_training", train)
    if agrees:
        command.demo(out=tmp_path / "out", ranks=2, steps=2, layers=1, width=64, eager=False)
    else:
        with pytest.raises(HpmlError, match="the losses differ"):
            command.demo(out=tmp_path / "out", ranks=2, steps=2, layers=1, width=64, eager=False)
    printed = capsys.readouterr().out
    assert "mesh dp=2 x tp=4" in printed and "relative difference" in printed and "$ python" in printed
    assert (tmp_path / "out" / "loss.png").exists()


def test_a_width_that_heads_do_not_divide_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="multiple of 64") as raised:
        command.demo(out=tmp_path / "out", ranks=2, steps=2, layers=1, width=100, eager=False)
    assert "128" in raised.value.next_step and not (tmp_path / "out").exists()


@pytest.mark.parametrize("eager", [False, True])
def test_without_a_cxx_compiler_it_does_without_inductor(tmp_path, monkeypatch, capsys, eager):
    given = []

    def train(ranks, arguments, environment, on_step):
        given.append(arguments)
        if ranks > 1:
            gpt_plan().save(environment["HPML_SAVE_PLAN"])
        return a_run(ranks, 2.0, 1.0)

    monkeypatch.setattr(training_runs, "run_training", train)
    missing = _checks.Check("C++ compiler", "missing", "none found", "Debian: apt-get install g++")
    monkeypatch.setattr(command, "check_compiler", lambda: missing)
    command.demo(out=tmp_path, ranks=2, steps=2, layers=1, width=64, eager=eager)
    assert [json.loads(arguments[-1].partition("=")[2]) for arguments in given] == [{"compiler": "eager"}] * 2
    assert ("apt-get install g++" in capsys.readouterr().out) == (not eager)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_demo(tmp_path):
    """Whole, with one layer of the full width and few steps."""
    out = tmp_path / "made" / "here"
    done = subprocess.run(
        [sys.executable, "-m", "hpml_compiler.cli", "demo", "--out", str(out), "--steps", "3", "--layers", "1"],
        capture_output=True, text=True, timeout=220, env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mesh x=2" in done.stdout and "1.9 M parameters, 3 steps" in done.stdout
    assert "\x1b" not in done.stdout, "escape codes are for terminals"
    plan = Plan.load(out / "plan.json")
    assert (plan.world_size, len(plan.graphs)) == (2, 1)
    assert plan.collectives, "a layer of this width is worth splitting"
    left = {path.name for path in out.iterdir()}
    assert left == {"plan.json", "loss.png", "plan.svg" if shutil.which("dot") else "plan.gv"}
    assert json.loads((out / "plan.json").read_text())["world_size"] == 2
