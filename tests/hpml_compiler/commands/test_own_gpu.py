"""`hpml run` on several GPUs: every rank's script runs as `python script.py` would, with a current GPU of its own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpml_compiler.commands import _rank, run

SCRIPT = """
import json, sys, beside
print(json.dumps([__name__, sys.argv, beside.VALUE, sys.modules["__main__"].__dict__["json"] is json]))
"""


@pytest.fixture
def scripts(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7")
    return tmp_path


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"]])
def test_the_script_is_the_main_module(scripts, how):
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-m", "hpml_compiler.commands._rank", *how, "--lr", "1"], cwd=scripts,
                          env={**os.environ, "LOCAL_RANK": "1", "PYTHONPATH": str(root)}, capture_output=True, text=True,
                          timeout=110)
    assert done.returncode == 0, done.stderr
    name, argv, value, is_main = json.loads(done.stdout)
    assert (name, value, is_main, argv[1:]) == ("__main__", 7, True, ["--lr", "1"]) and argv[0].endswith("train.py")


def test_the_gpu_of_a_rank_is_by_its_local_number(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        _rank.choose_gpu()
    assert chosen == [0, 1, 0]


@pytest.mark.parametrize(("gpus", "module", "started"), [
    (0, False, (False, "train.py", ["--lr"])), (1, True, (True, "train.py", ["--lr"])),
    (2, False, (True, "hpml_compiler.commands._rank", ["train.py", "--lr"])),
    (2, True, (True, "hpml_compiler.commands._rank", ["-m", "train.py", "--lr"])),
])
def test_only_where_there_are_several(monkeypatch, gpus, module, started):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert run.started("train.py", ["--lr"], module) == started
