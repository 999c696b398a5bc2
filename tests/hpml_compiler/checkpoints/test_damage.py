"""Checkpoint -> damaged in any way, or killed while it is written: always noticed, and the newest whole one is loaded."""
from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder, HashingStream, name_of
from hpml_compiler.checkpoints.manifest import Damage, damage, read_manifest
from passes.errors import BadInput


def training(folder, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    return model, optimizer, hpml_compiler.Checkpointer(folder, model, optimizer, extra={"average": average}, **arguments)


def train(model, optimizer, checkpointer, steps):
    values = {0: weights(model)}
    for k in steps:
        optimizer.zero_grad()
        model(torch.ones(2, 4) * k).square().sum().backward()
        optimizer.step()
        values[k + 1] = weights(model)
        checkpointer.step(k)
    return values


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved(folder, steps=3, **arguments):
    model, optimizer, checkpointer = training(folder, every=1, **arguments)
    values = train(model, optimizer, checkpointer, range(steps))
    checkpointer.close()
    return values


def problem(folder, step):
    opened = CheckpointFolder(folder)
    manifest = read_manifest(opened, step)
    return manifest if isinstance(manifest, Damage) else damage(opened, manifest)


def flip(rng, top, others):
    path = rng.choice(files_of(top))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng, top, others):
    path = rng.choice(files_of(top))
    path.write_bytes(path.read_bytes()[:rng.randrange(path.stat().st_size)])


def mix(rng, top, others):
    path = rng.choice(files_of(top))
    other = rng.choice(others) / path.relative_to(top)
    shutil.copy(other, path)


def remove(rng, top, others):
    rng.choice(files_of(top)).unlink()


def add(rng, top, others):
    path = rng.choice([top, top / "model"]) / rng.choice(["more.safetensors", "notes.txt", ".hidden", "model.bin"])
    path.write_bytes(rng.randbytes(rng.randrange(100)))


def rename(rng, top, others):
    shutil.rmtree(top)
    shutil.copytree(rng.choice(others), top)


def files_of(top):
    return sorted(path for path in top.rglob("*") if path.is_file())


@pytest.mark.parametrize("spoil", [flip, truncate, mix, remove, add, rename])
def test_fifty_damaged_checkpoints_of_each_kind_are_found(tmp_path, spoil):
    saved(tmp_path / "good")
    assert [problem(tmp_path / "good", step) for step in (1, 2, 3)] == [None] * 3
    rng = random.Random(spoil.__name__)
    for number in range(50):
        run = tmp_path / f"run{number}"
        shutil.copytree(tmp_path / "good", run)
        spoil(rng, run / name_of(3), [run / name_of(1), run / name_of(2)])
        assert isinstance(problem(run, 3), Damage), number
        assert problem(run, 1) is problem(run, 2) is None
        shutil.rmtree(run)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, caplog):
    values = saved(tmp_path)
    path = next((tmp_path / name_of(3) / "optimizer").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    model, _, checkpointer = training(tmp_path)
    assert checkpointer.resume() == 2
    assert torch.equal(weights(model), values[2])
    assert path.name in caplog.text and "step 3 is damaged" in caplog.text
    for step in (1, 2):
        (tmp_path / name_of(step) / "manifest.json").unlink()
    with pytest.raises(BadInput, match="all 3 checkpoints are damaged"):
        checkpointer.resume()


def die_at(point, folder):
    """End this process at the point-th change of the file system in a folder; in the middle, where it is a write."""
    done = 0

    def pass_point():
        nonlocal done
        done += 1
        return done == point

    def audit(event, arguments):
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or event == "open" and "w" in str(arguments[1])
        if changes and str(folder) in str(arguments[0]) and pass_point():
            os._exit(9)

    def write(self, data, original=HashingStream.write):
        if pass_point():
            self._stream.write(data[:len(data) // 2])
            self._stream.flush()
            os._exit(9)
        original(self, data)

    def fsync(descriptor, original=os.fsync):
        if pass_point():
            os._exit(9)
        original(descriptor)

    sys.addaudithook(audit)
    HashingStream.write, os.fsync = write, fsync  # type: ignore[method-assign]


def test_killed_at_each_change_of_the_file_system(tmp_path):
    values = saved(tmp_path / "good", keep=2)  # the save that is killed also removes the oldest
    ends = []
    for point in range(1, 1000):
        run = tmp_path / f"run{point}"
        shutil.copytree(tmp_path / "good", run)
        if (child := os.fork()) == 0:
            model, optimizer, checkpointer = training(run, every=1, keep=2, background=False)
            start = checkpointer.resume()
            die_at(point, run)
            train(model, optimizer, checkpointer, range(start, start + 1))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        model, _, checkpointer = training(run)
        ends.append(checkpointer.resume())
        assert ends[-1] in (3, 4) and (code == 9 or ends[-1] == 4)
        assert ends[-1] == 4 or torch.equal(weights(model), values[3])
        assert sorted(path.name for path in run.iterdir())[0].startswith("step-"), "nothing is left behind"
        shutil.rmtree(run)
        if code == 0:
            break
    assert len(ends) >= 40 and ends == sorted(ends), "once renamed, it stays"


def test_files_that_cannot_be_checkpoints(tmp_path):
    (tmp_path / name_of(1)).mkdir()
    (tmp_path / name_of(1) / "manifest.json").write_text("{}")
    assert "manifest.json" in str(problem(tmp_path, 1))
    (Path(tmp_path) / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        training(tmp_path / "file" / "below")
