"""`make gpu`, tried out without a GPU: checks in processes of their own -> a table and one JSON object."""
from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_pass():
    spec = importlib.util.spec_from_file_location("gpu_pass", BENCHMARKS / "gpu_pass.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_pass"] = module
    spec.loader.exec_module(module)
    return module


def test_names_of_models_are_read_without_importing_the_file(gpu_pass, tmp_path):
    assert gpu_pass.names_in(str(BENCHMARKS / "small_models.py")) == ["mlp", "gpt", "biased", "convnet", "tied"]
    (tmp_path / "models.py").write_text("import not_there\nMODELS = dict(gpt2=gpt2, t5=t5,\n              vit=vit)\n")
    assert gpu_pass.names_in(str(tmp_path / "models.py")) == ["gpt2", "t5", "vit"]


def test_wheels_and_the_entry_point_are_put_on_the_path(gpu_pass, tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "")
    target = tmp_path / "packages"
    target.mkdir()
    gpu_pass.prepare(target, tmp_path / "wheels")
    assert (target / "one" / "__init__.py").exists()
    (entry,) = target.glob("hpml_compiler-*.dist-info/entry_points.txt")
    assert entry.read_text() == "[torch_dynamo_backends]\nhpml = hpml_compiler.backend:hpml\n"


def _arguments(**more) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", models=str(BENCHMARKS / "small_models.py"), names=["tied"], only=[], seconds=9.0,
                              jobs=1, **more)


@pytest.mark.parametrize(("here", "said"), [
    ({"status": "failed", "says": "no GPU", "needed": []}, "there is no GPU that torch can use"),
    ({"status": "passed", "says": "", "needed": ["pulp", "pydantic"]}, "needs pulp, pydantic; see --packages"),
    ({"status": "passed", "says": "", "needed": []}, "the 9 s were over"),
])
def test_what_cannot_be_run_says_why(gpu_pass, tmp_path, monkeypatch, capsys, here, said):
    monkeypatch.setattr(gpu_pass, "start", lambda check, *rest: {"status": "passed", "says": "", "seconds": 0.0, **here})
    found = gpu_pass.all_checks(_arguments(), tmp_path)
    skipped = {label for label, result in found.items() if result["status"] == "not run"}
    assert {"collectives", "model tied", "step_time", "run", "profile"} <= skipped
    assert all(found[label]["says"] == said for label in skipped - {"energy"}) and said in capsys.readouterr().out


def test_a_check_that_takes_too_long_is_ended(gpu_pass, tmp_path):
    result = gpu_pass.start(gpu_pass.Check("environment"), _arguments(), tmp_path, 0.2)
    assert result["status"] == "out of time" and "no result within" in result["says"]


def test_a_model_on_two_ranks_is_checked_and_reported(tmp_path):
    out = tmp_path / "result.json"
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu_pass.py"), "--device", "cpu", "--names", "tied", "--only",
                           "model", "--out", str(out)], capture_output=True, text=True, timeout=115)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["ok"] and set(found["checks"]) == {"environment", "model tied"}
    cases = found["checks"]["model tied"]["cases"]
    assert cases["float64 tp"]["loss_apart"] < 1e-12 and cases["float64 tp"]["graphs"] == 1
    assert json.loads(done.stdout.splitlines()[-1]) == found
