"""TARGET: files and modules that give (model, batch), and the errors of those that do not."""
from __future__ import annotations

import re
import sys

import pytest
import torch

from hpml_compiler.cli_target import load_target
from passes.errors import BadInput

GOOD = """
import torch
from neighbor_of_target import WIDTH

def mlp(width=WIDTH):
    return torch.nn.Linear(width, 2), {"input": torch.zeros(3, width)}

def needs(width, *, depth): ...
def fails(): return 1 / 0
def leaves(): raise SystemExit(3)
def lonely(): return torch.nn.Linear(1, 1)
def swapped(): return torch.zeros(1), torch.nn.Linear(1, 1)
def no_batch(): return torch.nn.Linear(1, 1), None
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_target.py").write_text(GOOD)
    (tmp_path / "neighbor_of_target.py").write_text("WIDTH = 4\n")
    (tmp_path / "broken_target.py").write_text("import torch\nimport no_such_package\n")
    (tmp_path / "script_target.py").write_text("import sys\nsys.exit('usage: script')\n")
    (tmp_path / "syntax_target.py").write_text("def f(:\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - names:
        if "target" in name:
            del sys.modules[name]


@pytest.mark.parametrize("target", ["my_target.py:mlp", "./my_target.py:mlp", "my_target:mlp"])
def test_file_and_module(folder, target):
    model, batch = load_target(target)
    assert isinstance(model, torch.nn.Linear) and batch["input"].shape == (3, 4)


def test_file_from_elsewhere_finds_its_neighbors(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert load_target(f"{folder}/my_target.py:mlp")[0].in_features == 4


def test_edited_file_is_read_again(folder):
    load_target("my_target.py:mlp")
    (folder / "my_target.py").write_text(GOOD.replace("width=WIDTH", "width=32"))
    assert load_target("my_target.py:mlp")[0].in_features == 32


@pytest.mark.parametrize(("target", "message", "next_step"), [
    ("my_target.py", "is not a target", "FILE.py:FUNCTION"),
    ("my_target.py:", "is not a target", "FILE.py:FUNCTION"),
    ("my_targt.py:mlp", "no file my_targt.py", "did you mean my_target.py"),
    ("no_such_target:mlp", "no module 'no_such_target'", "no_such_target.py:FUNCTION"),
    ("no.such.target:mlp", "no module 'no.such.target'", "no/such/target.py"),
    ("my_target.py:mlq", "no 'mlq'", "did you mean my_target.py:mlp"),
    ("my_target.py:zzzzz", "no 'zzzzz'", "mlp, needs"),
    ("my_target.py:number", "is a int, not a function", "mlp"),
    ("my_target.py:needs", "needs the arguments width, depth", "defaults"),
    ("my_target.py:fails", "ZeroDivisionError: division by zero", "fix"),
    ("my_target.py:leaves", "ended the process .exit 3", "__main__"),
    ("my_target.py:lonely", "returned a Linear, not", "return .model, batch"),
    ("my_target.py:swapped", "returned a Tensor as the model", "return .model, batch"),
    ("my_target.py:no_batch", "returned a NoneType as the batch", "return .model, batch"),
    ("broken_target.py:mlp", "No module named 'no_such_package'", "fix"),
    ("broken_target:mlp", "No module named 'no_such_package'", "fix"),
    ("script_target.py:mlp", "ended the process", "__main__"),
    ("syntax_target.py:mlp", "SyntaxError", "fix"),
])
def test_bad_targets(folder, target, message, next_step):
    with pytest.raises(BadInput, match=message) as caught:
        load_target(target)
    assert re.search(next_step, caught.value.next_step)


def test_error_in_the_users_code_names_its_line(folder):
    with pytest.raises(BadInput) as caught:
        load_target("broken_target.py:mlp")
    assert "broken_target.py, line 2" in caught.value.where
    with pytest.raises(BadInput) as caught:
        load_target("syntax_target.py:mlp")
    assert "syntax_target.py, line 1" in caught.value.where
