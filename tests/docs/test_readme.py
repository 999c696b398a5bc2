"""README.md does what it says: its examples run, its options and commands are those that there are."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpml_compiler import cli
from hpml_compiler.options import OPTIMIZER_STATES, Options
from hpml_compiler.plans.plan import Plan
from passes.machine.cluster import builtin_devices

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its first two lines."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def test_the_options_are_all_there_with_their_defaults():
    described = {row[0].strip("`"): row[1] for row in rows("Options")}
    assert set(described) == set(Options.model_fields)
    for name, field in Options.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if default is not None:
            shown = f'"{default}"' if isinstance(default, str) else repr(default)
            assert described[name] == f"`{shown}`", name


def test_lists_of_names_are_complete():
    assert set(re.findall(r"`([\w-]+)`", TEXT.split("Built-in devices:")[1].split("\n")[0])) == set(builtin_devices())
    (optimizers,) = (row[2] for row in rows("Options") if row[0] == "`optimizer`")
    assert set(re.findall(r"`(\w+)`", optimizers)) == set(OPTIMIZER_STATES)


def test_the_commands_are_those_that_there_are():
    described = {row[0].split()[1].strip("`") for row in rows("Command line")}
    assert described == {command.name for command in cli.app.registered_commands}


def test_the_files_it_names_exist():
    for path in re.findall(r"\]\(([\w/.]+)\)|(?<![\w/])((?:docs|passes|hpml_compiler)/[\w/]+\.\w+)", TEXT):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_the_plan_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = (text for text in EXAMPLES if "hpml_compiler.plan(" in text)
    exec(compile(example, "README.md", "exec"), {})
    assert Plan.load("plan.json").mesh == {"dp": 2, "tp": 2}
    assert "blocks.0.up.weight" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_first_example_runs_on_two_ranks(tmp_path):
    (example,) = (text for text in EXAMPLES if text.startswith("# train.py\n"))
    assert example.count("hpml") == 1
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "hpml_compiler.cli", "run", "--nproc", "2", "train.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"step (\d) loss (\d+\.\d{6})", done.stdout)
    assert sorted(step for step, _ in losses) == sorted("0123401234")
    assert len(set(losses)) == 5, "both ranks print the same"
