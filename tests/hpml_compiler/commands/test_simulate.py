"""`hpml simulate` from the outside."""
from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hpml_compiler.cli import app, main
from hpml_compiler.simulate import simulate
from tests.hpml_compiler.simulate.toy import chain_plan


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    chain_plan(3).save(path)
    return path


def test_a_table_a_picture_and_a_trace(saved, tmp_path):
    done = CliRunner().invoke(app, ["simulate", str(saved), "--recompute", "full", "--timeline", str(tmp_path / "t.png"),
                                    "--trace", str(tmp_path / "t.json")])
    assert done.exit_code == 0, done.output
    for word in ("exposed communication", "bubble", "optimizer", "all_gather", "recompute", "peak", "estimated", "2 ranks"):
        assert word in done.output
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_json_says_what_the_function_does(saved):
    done = CliRunner().invoke(app, ["simulate", str(saved), "--json", "--microbatches", "2", "--cluster", "1x2:a100-80g",
                                    "--contention", "1.5"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == simulate(chain_plan(3), "1x2:a100-80g", microbatches=2, contention=1.5).summary()
    serial = CliRunner().invoke(app, ["simulate", str(saved), "--json", "--no-overlap"])
    assert json.loads(serial.stdout)["step_us"] == pytest.approx(chain_plan(3).predicted.step_time_us)


@pytest.mark.parametrize("extra, said", [
    (["--recompute", "half"], "'half' is not one of 'none', 'full'"), (["--cluster", "1x3:cpu"], "hpml: "),
    (["--microbatches", "0"], "hpml: "), (["--trace", "no/such/folder/t.json"], "hpml: "),
    (["--timeline", "no/such/folder/t.png"], "hpml: ")])
def test_bad_input_exits_2_and_says_what_to_do(saved, extra, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", str(saved), *extra])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
