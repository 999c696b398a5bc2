"""examples/ on two ranks -> the losses of one device, and a resumed run goes on as the first one did."""
from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120", "TOKENIZERS_PARALLELISM": "false",
         "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def run_example(rank: int, name: str, *arguments: str) -> str:
    """What this rank prints; one alone is not told of ranks."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        for variable in [key for key in os.environ if key.startswith("TORCHELASTIC_") or key in RANKS]:
            del os.environ[variable]
    else:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    os.environ.update(QUIET)
    sys.argv = [name, *arguments, "--compiler", "eager"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return output.getvalue()


RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def numbers(output: str) -> dict[str, list[float]]:
    """What the examples print, line by line: "step 3 loss 0.5 norm 0.1" -> {"step 3": [0.5, 0.1]}."""
    lines = re.findall(r"((?:step|epoch) \d+|evaluation) (.*\d)", output)
    found = {where: [float(number) for number in re.findall(r"\d+\.\d+", rest)] for where, rest in lines}
    assert found, output[-4000:]
    return found


def compare(one: str, two: str, resumed: str, first_resumed: str) -> None:
    expected, split, later = numbers(one), numbers(two), numbers(resumed)
    assert list(split) == list(expected)
    assert first_resumed in later and set(later) < set(split), "the resumed run goes on, and does not begin anew"
    for found in (split, later):
        for where, values in found.items():
            assert values == pytest.approx(expected[where], rel=2e-3, abs=2e-4), where


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: pip install -e '.[examples]'")


CASES = [
    pytest.param("accelerate_loop.py", "step 7", marks=needs("accelerate"), id="accelerate"),
    pytest.param("huggingface_trainer.py", "step 7", marks=needs("accelerate", "transformers"), id="transformers"),
    pytest.param("lightning_trainer.py", "step 9", marks=needs("lightning"), id="lightning"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, first_resumed", CASES)
def test_one_device_and_two_ranks(launch, tmp_path, name, first_resumed):
    def run(ranks: int, folder: str, *more: str) -> str:
        arguments = ("--output", str(tmp_path / folder), *more)
        return "\n".join(launch(run_example, ranks, (name, *arguments), timeout_s=200, init=False))

    compare(run(1, "one"), run(2, "two"), run(2, "two", "--resume"), first_resumed)


NEIGHBOURS = {"lora.py": ["peft", "transformers"], "distillation.py": [], "pruning.py": [],
              "quantization_aware.py": ["torchao"], "export.py": ["onnx", "onnxscript"]}


def run_examples(rank: int, names: list[str], folder: str) -> list[str]:
    return [run_example(rank, name, "--output", f"{folder}/{name}") for name in names]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_neighbours_on_two_ranks(launch, tmp_path):
    """All in one launch: to import torch and these libraries takes longer than the examples."""
    names = [name for name, packages in NEIGHBOURS.items() if all(map(importlib.util.find_spec, packages))]
    (one,) = launch(run_examples, 1, (names, str(tmp_path / "one")), timeout_s=180, init=False)
    two = launch(run_examples, 2, (names, str(tmp_path / "two")), timeout_s=180, init=False)
    for name, expected, *found in zip(names, one, *two):
        wanted = numbers(expected)
        assert len(wanted) >= 4, name
        for rank, values in enumerate(map(numbers, found)):
            assert set(values) == set(wanted) - ({"evaluation"} if rank and name != "pruning.py" else set()), name
            for where, value in values.items():
                assert value == pytest.approx(wanted[where], rel=5e-3, abs=2e-4), (name, where)


@needs("optuna")
@pytest.mark.timeout(240)
def test_optuna_trains_only_what_fits_and_is_fast(launch):
    (said,) = launch(run_example, 1, ("optuna_search.py", "--trials", "4"), timeout_s=200, init=False)
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    wide = [line for line in lines if "'width': 1024" in line]
    assert len(lines) == 4 and len(wide) == 2 and all(line.endswith("pruned") for line in wide)
    assert [line for line in wide if " nan ms" in line] and [line for line in wide if " nan ms" not in line]
    assert all(" loss " in line for line in lines if line not in wide)


def ray_without_ray(saved: Path) -> str:
    """What Ray's example prints, from the same model and rows in a plain loop, which saves its first epoch's state: another
    start of Ray takes long."""
    example = runpy.run_path(str(ROOT / "examples/ray_train.py"))
    torch.manual_seed(0)
    model, lines = example["Classifier"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        lines.append(f"epoch {epoch}")
        for inputs, target in DataLoader(example["dataset"](256, 0), batch_size=example["GLOBAL_BATCH"]):
            loss = model(inputs, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lines[-1] += f" {loss.item():.6f}"
        if epoch == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, saved)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("ray")
def test_ray_resumes_what_one_device_began(tmp_path):
    checkpoint = tmp_path / "plain" / "checkpoint_0"
    checkpoint.mkdir(parents=True)
    expected = numbers(ray_without_ray(checkpoint / "state.pt"))
    command = [sys.executable, str(ROOT / "examples/ray_train.py"), "--workers", "2", "--output", str(tmp_path), "--resume",
               "--compiler", "eager"]
    done = subprocess.run(command, env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = numbers(done.stdout)
    assert found == {"epoch 1": pytest.approx(expected["epoch 1"], rel=2e-3, abs=2e-4)}
    (saved,) = tmp_path.glob("workers_2/checkpoint_*/state.pt")
    assert torch.load(saved)["epoch"] == 1
