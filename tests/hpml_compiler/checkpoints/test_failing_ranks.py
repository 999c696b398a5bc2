"""One rank cannot write, or has another state -> all ranks raise the same error, nothing is left, and the next save works."""
from __future__ import annotations

import errno
import os

import pytest
import torch
import torch.distributed as dist

import hpml_compiler
from hpml_compiler.checkpoints.checkpoint_folder import HashingStream, name_of
from passes.errors import BadInput


class Counter:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def run_failures(rank, folder):
    model = torch.nn.Linear(64, 64)
    counter = Counter(0)
    checkpointer = hpml_compiler.Checkpointer(folder, model, torch.optim.AdamW(model.parameters()), extra={"mine": counter},
                                              every=1)
    said = []

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = HashingStream.write
    if rank == 1:
        HashingStream.write = full  # type: ignore[method-assign]
    for background in (True, False):
        with pytest.raises(BadInput) as raised:
            checkpointer.save(0, wait=not background)
            checkpointer.wait()
        said.append(str(raised.value))
    HashingStream.write = write  # type: ignore[method-assign]
    counter.value = rank
    with pytest.raises(BadInput) as raised:
        checkpointer.save(0, wait=True)
    said.append(str(raised.value))
    counter.value = (lambda: 0) if rank == 1 else 0
    with pytest.raises(BadInput) as raised:
        checkpointer.save(0)
    said.append(str(raised.value))
    dist.barrier()
    assert os.listdir(folder) == []
    counter.value = 5
    checkpointer.step(0)
    checkpointer.close()
    again = Counter(0)
    assert hpml_compiler.Checkpointer(folder, model, torch.optim.AdamW(model.parameters()), extra={"mine": again}).resume() == 1
    assert again.value == 5 and os.listdir(folder) == [name_of(1)]
    return said


def test_all_ranks_learn_of_it(launch, tmp_path):
    said, other = launch(run_failures, args=(str(tmp_path / "run"),))
    assert said == other
    for text, expected in zip(said, ("No space left on device", "No space left", "differs between ranks", "without pickle"),
                              strict=True):
        assert expected in text and "next step" in text
    assert "rank 1" in said[0]
