"""README.md: its examples run, and the files that it names exist."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpml_compiler.plan_api.model_plan import Plan

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


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
