"""Attempts and launchers that cannot work -> what is wrong, where, and the next step."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.elastic.attempts import Attempt, StateLost, _Run
from hpml_compiler.elastic.launcher import run_elastic
from passes.errors import HpmlError


def _checkpointer(folder: Path, **arguments: Any) -> hpml_compiler.Checkpointer:
    model = nn.Linear(2, 2)
    return hpml_compiler.Checkpointer(folder, model, torch.optim.SGD(model.parameters()), **arguments)


def _batch(attempts: Iterator[Attempt]) -> None:
    for attempt in attempts:
        with attempt:
            attempt.batch()


def _outside(attempts: Iterator[Attempt]) -> None:
    for _ in attempts:
        pass


@pytest.mark.parametrize(("body", "loader", "message"), [
    (_outside, None, "a step ran outside of its attempt"), (_batch, None, "the checkpointer has no loader"),
    (_batch, [], "the loader has no batches"),
])
def test_bodies(tmp_path: Path, body: Callable, loader: list | None, message: str) -> None:
    checkpointer = _checkpointer(tmp_path, loader=None if loader is None else hpml_compiler.distribute(loader))
    with checkpointer, pytest.raises(HpmlError, match=message) as raised:
        body(hpml_compiler.attempts(checkpointer, 2))
    assert raised.value.where and raised.value.next_step


def test_nothing_is_left(tmp_path: Path) -> None:
    with _checkpointer(tmp_path) as checkpointer, pytest.raises(StateLost, match="no ranks that are left") as raised:
        _Run(checkpointer, None)._restored(is_there=False)
    assert "redundancy: 1" in raised.value.next_step


@pytest.mark.parametrize(("alone", "gpus", "message", "next_step"), [
    (False, False, "on one node alone", "--nnodes MIN:MAX"), (True, True, "process groups of NCCL", "use --max-restarts"),
])
def test_machines(monkeypatch: pytest.MonkeyPatch, alone: bool, gpus: bool, message: str, next_step: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    with pytest.raises(HpmlError, match=message) as raised:
        run_elastic(["true"], 2, 1, replace=False, stop_s=1.0, alone=alone)
    assert raised.value.where == "--elastic" and next_step in raised.value.next_step
