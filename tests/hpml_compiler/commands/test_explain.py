"""`hpml explain` with formulas: from a model, from a file, and refused arguments."""
from __future__ import annotations

import sys

import pytest
import typer
from typer.testing import CliRunner

from hpml_compiler.commands import explain as explain_command
from hpml_compiler.commands import plan as plan_command
from passes.errors import BadInput
from tests.helpers.plans import gpt_plan

TARGET = """
import torch
class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()
def mlp():
    return MLP(), torch.zeros(8, 16)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, and the formulas that `--save` wrote of it."""
    path = tmp_path_factory.mktemp("explain")
    (path / "growth_target.py").write_text(TARGET)
    before = list(sys.path)
    done = run(f"{path}/growth_target.py:mlp", "--cluster", "1x4:cpu", "--fix", "dp=2", "--fix", "tp=2",
               "--grow", "--what-if", "batch=32", "--save", str(path / "formulas.json"))
    sys.path[:] = before
    assert done.exit_code == 0, done.exception
    return path, done.stdout


def run(*arguments: str):
    app = typer.Typer()
    plan_command.register(app)
    explain_command.register(app)
    return CliRunner().invoke(app, ["explain", *arguments])


def test_growth_and_what_if_of_a_model(folder):
    _, text = folder
    assert "x (batch/8) / (dp/2)" in text and "batch x2" in text
    (flops,) = [line for line in text.splitlines() if line.startswith("FLOPs") and line.endswith("x4")]
    assert flops.split()[0] == "FLOPs"


def test_a_file_of_formulas_answers_without_the_model(folder):
    path, _ = folder
    done = run(str(path / "formulas.json"), "--what-if", "dp=4", "--what-if", "batch=16")
    assert done.exit_code == 0 and "batch=16" in done.stdout and "dp=4" in done.stdout
    assert "then on 2x4:cpu" in done.stdout
    of_block = run(str(path / "formulas.json"), "up", "--grow")
    assert of_block.stdout.startswith("up per device") and "32.0" not in of_block.stdout.splitlines()[0]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--what-if", "batch"], "is not NAME=NUMBER"), (["--what-if", "pp=2"], "is no size"),
    (["--what-if", "dp=3"], "does not divide"), (["nothing", "--grow"], "no block, node or parameter"),
    (["--what-if", "dp=2", "--what-if", "dp=4"], "given twice"),
])
def test_what_cannot_be_answered_is_refused(folder, arguments, message):
    done = run(str(folder[0] / "formulas.json"), *arguments)
    assert isinstance(done.exception, BadInput) and message in str(done.exception)


def test_a_plan_alone_does_not_say_how_it_grows(tmp_path):
    gpt_plan().save(tmp_path / "plan.json")
    done = run(str(tmp_path / "plan.json"), "--grow")
    assert isinstance(done.exception, BadInput) and "--fix plan=" in str(done.exception)


def test_without_a_name_there_is_nothing_to_explain(tmp_path):
    gpt_plan().save(tmp_path / "plan.json")
    for target in (str(tmp_path / "plan.json"), "models.py:gpt"):
        done = run(target)
        assert isinstance(done.exception, BadInput) and "NAME is missing" in str(done.exception)
