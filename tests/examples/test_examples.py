"""examples/ on two ranks -> the losses of one device, and a resumed run goes on as the first one did."""
from __future__ import annotations

import importlib.util
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
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0",
         "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120", "TOKENIZERS_PARALLELISM": "false",
         "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def started(ranks: int, name: str, *arguments: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.Popen([sys.executable, *launcher, str(ROOT / "examples" / name), *arguments, "--compiler", "eager"],
                            env={**os.environ, **QUIET}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output


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
def test_one_device_and_two_ranks(tmp_path, name, first_resumed):
    runs = [started(1, name, "--output", str(tmp_path / "one")), started(2, name, "--output", str(tmp_path / "two"))]
    one, two = map(output_of, runs)
    resumed = output_of(started(2, name, "--output", str(tmp_path / "two"), "--resume"))
    compare(one, two, resumed, first_resumed)


def ray_without_ray() -> str:
    """What Ray's example prints, from the same model and rows in a plain loop: a third start of Ray would take a minute."""
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
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs("ray")
def test_ray(tmp_path):
    def run(*more: str) -> str:
        return output_of(started(1, "ray_train.py", "--workers", "2", "--output", str(tmp_path), *more))

    compare(ray_without_ray(), run(), run("--resume"), "epoch 1")
