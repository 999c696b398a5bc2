"""`hpml checkpoint list|verify|convert` -> a table, damage by name, the model as whole tensors that safetensors reads."""
from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hpml_compiler
from hpml_compiler.checkpoints.checkpoint_folder import name_of
from hpml_compiler.checkpoints.inspection import chosen, convert, dtype_named, listed, opened
from hpml_compiler.cli import main
from passes.errors import BadInput
from tests.hpml_compiler.checkpoints.toy import Blocks, Run


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))


def hpml(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def test_the_command(tmp_path, capsys):
    run = Run(str(tmp_path / "run"), every=1, keep=None)
    run.train(3)
    run.checkpointer.close()
    code, out, _ = hpml(capsys, "list", tmp_path / "run", "--json")
    assert code == 0 and [(each["step"], each["damage"], each["ranks"]) for each in json.loads(out)["checkpoints"]] == [
        (1, "", 1), (2, "", 1), (3, "", 1)]
    path = tmp_path / "run" / name_of(3) / "model" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert hpml(capsys, "list", tmp_path / "run")[0] == 0
    code, out, err = hpml(capsys, "verify", tmp_path / "run")
    assert code == 2 and "whole" in out and "1 of 3 checkpoints are damaged" in err and path.name in err
    code, out, _ = hpml(capsys, "convert", tmp_path / "run", tmp_path / "model", "--dtype", "bf16")
    assert code == 0 and "step 2" in out, "the newest that is whole"
    state = load_file(tmp_path / "model" / "model.safetensors")
    assert state.keys() == Blocks().state_dict().keys() and {value.dtype for value in state.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("arguments", "message"), [
    (["list", "{}/nothing"], "has no checkpoints"), (["verify", "{}/empty"], "has no checkpoints"),
    (["convert", "{}/run", "{}/x", "--step", "9"], "no checkpoint of step 9"),
    (["convert", "{}/run", "{}/run"], "not an empty folder"),
    (["convert", "{}/run", "{}/x", "--dtype", "int8"], "no floating-point"),
    (["convert", "{}/run", "{}/x", "--file-size", "big"], "not a size"), (["list", "{}/run/file"], "is a file"),
    (["list", "nosuch://x"], "cannot be opened"), (["list"], "FOLDER"), (["convert", "{}/run"], "TARGET"),
])
def test_bad_command_lines(tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    hpml_compiler.Checkpointer(tmp_path / "run", nn.Linear(2, 2)).save(0, wait=True)
    (tmp_path / "run" / "file").write_text("")
    code, _, err = hpml(capsys, *(each.format(tmp_path) for each in arguments))
    assert code == 2 and message in err and "next step" in err and "Traceback" not in err


def test_tied_weights_are_written_once(tmp_path):
    hpml_compiler.Checkpointer(tmp_path / "run", Tied()).save(0, wait=True)
    model = Tied()
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert hpml_compiler.Checkpointer(tmp_path / "run", model).resume() == 1
    assert model.head.weight is model.embedding.weight and model.head.weight.abs().sum() > 0
    convert(opened(str(tmp_path / "run")), None, tmp_path / "model", file_bytes=100)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"embedding.weight", "count"} and len(set(index["weight_map"].values())) == 2
    found = {name: value for path in (tmp_path / "model").glob("*.safetensors") for name, value in load_file(path).items()}
    assert torch.equal(found["embedding.weight"], model.head.weight) and found["count"] == 3


def run_save(rank, folder):
    run = Run(folder, {"mesh": {"tp": 2}}, every=1)
    run.train(1)
    run.checkpointer.close()
    whole = hpml_compiler.full_state_dict(run.model)
    dist.barrier()
    return {name: value.tolist() for name, value in whole.items()}


def test_shards_become_whole_tensors(launch, tmp_path):
    expected = launch(run_save, args=(str(tmp_path / "run"),))[0]
    folder = opened(str(tmp_path / "run"))
    assert len(folder.files(name_of(1))) == 6 and [each.damage for each in listed(folder, hashed=True)] == [""]
    assert convert(folder, 1, tmp_path / "model") == (1, len(expected))
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == expected
    assert chosen(folder, None).writer["mesh"] == {"tp": 2}


def test_names_of_dtypes():
    assert dtype_named("BF16") == dtype_named("bfloat16") == torch.bfloat16
    with pytest.raises(BadInput):
        dtype_named("float")
