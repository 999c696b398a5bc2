"""Folders, models and options that do not fit -> what is wrong, where, and the next step."""
from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder, HashingStream, name_of
from hpml_compiler.checkpoints.json_state import StateEncoder, decode
from hpml_compiler.runtime.weights.safetensors_files import SafetensorsReader
from passes.errors import BadInput


def made(folder, model=None, optimizer=None, **arguments):
    model = model or nn.Linear(4, 4)
    return hpml_compiler.Checkpointer(folder, model, torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer,
                                      **arguments)


def saved(folder, **arguments):
    checkpointer = made(folder, **arguments)
    checkpointer.save(0, wait=True)


class Counter:
    """Has a state dict, of whatever it is given."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def two_groups():
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])}


@pytest.mark.parametrize(("before", "now", "message"), [
    ({}, {"model": nn.Linear(4, 5)}, "another model: bias is 4 of float32, that of the model 5 of float32"),
    ({}, {"model": nn.Linear(4, 4).double()}, "another model: bias is 4 of float32, that of the model 4 of float64"),
    ({}, {"model": nn.Linear(4, 4, bias=False)}, "another model: it has the tensor bias, the model has not"),
    ({}, {"model": nn.Sequential(nn.Linear(4, 4))}, "another model: it has no tensor 0.bias, the model has"),
    ({}, {"optimizer": ()}, "has 1 optimizers, but 0 are given"),
    ({}, two_groups(), r"other parameters: \[2\] in the checkpoint, \[1, 1\] here"),
    ({}, {"scheduler": Counter()}, "has 0 schedulers, but 1 are given"),
    ({"loader": Counter()}, {}, "has 1 loaders, but 0 are given"),
    ({"extra": {"average": Counter()}}, {}, "extra 'average' is in the checkpoint, but not given"),
    ({}, {"extra": {"average": Counter()}}, "extra 'average' is not in the checkpoint"),
    ({"loader": Counter()}, {"loader": hpml_compiler.distribute([])}, "loader of another kind"),
])
def test_a_checkpoint_of_something_else(tmp_path, before, now, message):
    saved(tmp_path, **before)
    with pytest.raises(BadInput, match=message) as raised:
        made(tmp_path, **now).resume()
    assert raised.value.where and raised.value.next_step


@pytest.mark.parametrize(("arguments", "message"), [
    ({"every": 0}, "every=0 is not a positive number"), ({"keep": -1}, "keep=-1 is not a positive number"),
    ({"every": 2.5}, "every=2.5 is not"), ({"every": True}, "every=True is not"), ({"keep": "3"}, "keep='3' is not"),
    ({"loader": [1, 2]}, "a list has no state_dict"), ({"extra": {"best": 0.3}}, "a float has no state_dict"),
    ({"scheduler": [None]}, "a NoneType has no state_dict"),
])
def test_arguments(tmp_path, arguments, message):
    with pytest.raises(BadInput, match=message) as raised:
        made(tmp_path, **arguments)
    assert raised.value.where and raised.value.next_step


@pytest.mark.parametrize(("folder", "message"), [
    ("nosuch://bucket/run", "cannot be opened"), ("/proc/run", "cannot be written"), ("/dev/null", "cannot be written"),
    ("/dev/null/run", "cannot be written"), ("x" * 300, "cannot be written"),
])
def test_folders(folder, message):
    with pytest.raises(BadInput, match=message) as raised:
        made(folder)
    assert folder in raised.value.where and raised.value.next_step


def test_steps_that_are_counted_from_1(tmp_path):
    checkpointer = made(tmp_path, every=2)
    for begins in (0, 2):
        assert checkpointer.resume() == begins
        with pytest.raises(BadInput, match="steps are counted from 0") as raised:
            checkpointer.step(begins + 1)
        assert "before k goes up" in raised.value.next_step
        for k in (begins, begins + 1):
            checkpointer.step(k)
        checkpointer.wait()


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk(tmp_path, monkeypatch, background, caplog):
    checkpointer = made(tmp_path, every=1, background=background)
    checkpointer.save(0, wait=True)

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(HashingStream, "write", full)
        with pytest.raises(BadInput, match="step 2 cannot be written: No space left on device") as raised:
            checkpointer.step(1)
            checkpointer.wait()
    assert "rank 0" in raised.value.where and "keep fewer" in raised.value.next_step and "step 2" in caplog.text
    assert os.listdir(tmp_path) == [name_of(1)], "nothing is left of it"
    checkpointer.save(2, wait=True)
    assert made(tmp_path).resume() == 3


@pytest.mark.parametrize(("value", "message"), [
    (lambda: 0, "builtins.function cannot be saved without pickle"), (nn.Linear(1, 1), "Linear cannot be saved"),
    (object(), "builtins.object cannot be saved"), ({"a": [1, {2: 1j}]}, "builtins.complex cannot be saved"),
])
def test_state_that_needs_pickle(tmp_path, value, message):
    with pytest.raises(BadInput, match=message) as raised:
        made(tmp_path, extra={"mine": Counter(value)}).save(0)
    assert "extra/mine.value" in raised.value.where


def test_a_model_without_memory(tmp_path):
    saved(tmp_path)
    with torch.device("meta"):
        checkpointer = made(tmp_path, nn.Linear(4, 4))
    for call in (checkpointer.resume, lambda: checkpointer.save(0)):
        with pytest.raises(BadInput, match="weight is on the meta device"):
            call()


def test_tensors_without_a_name_in_safetensors(tmp_path):
    with pytest.raises(BadInput, match="complex128"):
        made(tmp_path, extra={"mine": Counter(torch.zeros(2, dtype=torch.complex128))}).save(0, wait=True)
    with pytest.raises(BadInput, match="layout torch.sparse_coo"):
        made(tmp_path, extra={"mine": Counter(torch.zeros(2).to_sparse())}).save(0, wait=True)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "does not begin"), (b"\x00" * 8, "does not begin"), (b"\xff" * 16, "does not begin"),
    (b"\x02" + b"\x00" * 7 + b"[]", "header cannot be read"), (b"\x05" + b"\x00" * 7 + b"{oops", "header cannot be read"),
    (None, "which its shape and dtype do not"),
])
def test_files_that_are_not_safetensors(tmp_path, content, message):
    if content is None:
        text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
        content = len(text).to_bytes(8, "little") + text
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=message), open(tmp_path / "x.safetensors", "rb") as stream:
        SafetensorsReader(stream, "x.safetensors")


def test_state_of_every_kind_comes_back():
    import collections
    import random

    import numpy as np

    value = {"numbers": [1, 2.5, float("inf"), None, True, 10**30], ("a", 1): {3: "x"}, "text": "é", "set": {3, 1},
             "bytes": b"\x00\xff", "array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(0.5),
             "tensor": torch.arange(4), "dtype": torch.bfloat16, "device": torch.device("cpu"), "$odd": 1,
             "deque": collections.deque([1, (2,)], maxlen=3), "counter": collections.Counter("aab"),
             "random": random.getstate()}
    for inline in (False, True):
        encoder = StateEncoder(inline)
        found = decode(json.loads(json.dumps(encoder.encode(value, "x"), allow_nan=False)), encoder.tensors)
        assert found.keys() == value.keys()
        for key, expected in value.items():
            same = np.array_equal if key == "array" else torch.equal if key == "tensor" else lambda a, b: a == b
            assert same(found[key], expected) and type(found[key]) is type(expected), key


def test_two_runs_of_one_folder_see_each_others_checkpoints(tmp_path):
    assert made(tmp_path).resume() == 0
    saved(tmp_path)
    assert CheckpointFolder(tmp_path).steps() == [1] and made(tmp_path).resume() == 1
