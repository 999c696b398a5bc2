"""Scripts -> messages of the backend."""
from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optim

import hpml_compiler
from hpml_compiler.runtime.install import uncompiled_models
from passes.errors import BadInput
from passes.session_state import state

LIBRARY = logging.getLogger("some.library")
SCRIPT = """
import torch
torch._dynamo.config.allow_rnn = {allow}
model = torch.compile(torch.nn.GRU(4, 4), backend="hpml", options={{"compiler": "eager"}})
model(torch.zeros(2, 3, 4))[0].sum().backward()
"""


def said(allow: bool, ranks: int) -> str:
    script = SCRIPT.format(allow=allow)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    if ranks == 1 or not allow:  # nobody communicates: one rank says it for both
        environment |= {"WORLD_SIZE": str(ranks), "RANK": "0"}
        command = [sys.executable, "-c", script]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                   "--no-python", sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("allow", "ranks", "warned"), [(False, 2, True), (False, 1, False), (True, 2, False)])
def test_a_model_that_never_came_to_the_backend_is_warned_of(allow, ranks, warned):
    assert ("is not compiled and runs in full on every rank" in said(allow, ranks)) == warned


NEVER_CALLED = """
import torch
model = torch.compile(torch.nn.Linear(4, 4), backend="hpml")
"""
RAISED = """
import torch
torch._dynamo.config.allow_rnn = False
model = torch.compile(torch.nn.GRU(4, 4), backend="hpml")
model(torch.zeros(2, 3, 5))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("script", "ends_with"), [(NEVER_CALLED, 0), (RAISED, 1)])
def test_a_model_that_was_not_called_or_failed_is_not_warned_of(script, ends_with):
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == ends_with, done.stderr[-3000:]
    assert "is not compiled and runs in full on every rank" not in done.stderr


class OnSparse(nn.Module):
    def forward(self, x):
        return torch.mm(x.to_sparse(), x)


class LeftOut(nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x.sin()


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x[None])[0]


@pytest.mark.parametrize(("model", "because"), [
    (OnSparse(), "sparse"), (LeftOut(), "torch.compiler.disable"), (nn.LSTM(4, 4), "allow_rnn"),
    pytest.param(Recurrent(4, 4), "allow_rnn", marks=pytest.mark.skipif(
        torch.__version__ >= (2, 15), reason="Dynamo of torch 2.15 ends in an internal error on it, with every backend"))],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "")
def test_it_is_said_after_the_first_call_with_dynamos_own_reason(model, because, monkeypatch, caplog):
    torch._dynamo.reset()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(state._parts, uncompiled_models._GraphCount, uncompiled_models._GraphCount())
    hpml_compiler.reset()
    compiled = torch.compile(model, backend="hpml")
    x = torch.eye(4) if not isinstance(model, nn.LSTM) or isinstance(model, Recurrent) else torch.eye(4)[None]
    for _ in range(3):
        compiled(x)
    (said,) = (each.getMessage() for each in caplog.records if each.name == "hpml")
    assert said.startswith(f"{type(model).__name__} is not compiled and runs in full on every rank") and because in said
    assert ("LSTM" in said) == isinstance(model, nn.LSTM)
    with pytest.raises(BadInput) as error:
        hpml_compiler.last_plan()
    assert error.value.what == said
    assert compiled.forward.__module__ != uncompiled_models.__name__, "after its first call, it is called as ever"
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("how", ["function", "module.compile()"])
def test_of_functions_it_is_said_at_the_first_step(how, monkeypatch, caplog):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(state._parts, uncompiled_models._GraphCount, uncompiled_models._GraphCount())
    monkeypatch.setattr(optim, "_global_optimizer_pre_hooks", OrderedDict())
    uncompiled_models.report_at_first_step()
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters())
    optimizer.step()  # of something else, before anything was called
    model = OnSparse()
    if how == "function":
        call = torch.compile(model.forward, backend="hpml")
    else:
        model.compile(backend="hpml")
        call = model
    for _ in range(3):
        call(torch.eye(4))
        optimizer.step()
    (said,) = (each.getMessage() for each in caplog.records if each.name == "hpml")
    assert "is not compiled and runs in full on every rank" in said and "sparse" in said


class Talking(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.layer, self.text = nn.Linear(4, 4), text

    def forward(self, x):
        x = self.layer(x)
        LIBRARY.warning_once(self.text.format(x.shape[0]))
        return x.sum()


@functools.lru_cache(None)
def warning_once(logger, text):
    logger.warning(text)


def test_messages_that_a_library_logs_once_do_not_break_the_graph(monkeypatch, caplog):
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    warning_once.cache_clear()
    torch._dynamo.reset()
    call = torch.compile(Talking("labels are missing, {} rows"), backend="hpml", fullgraph=True, options={"compiler": "eager"})

    for _ in range(2):
        call(torch.ones(2, 4)).backward()

    assert [r.getMessage() for r in caplog.records if r.name == "some.library"] == ["labels are missing, 2 rows"]


def test_public_names_are_listed():
    assert set(hpml_compiler.__all__) <= set(dir(hpml_compiler))
    assert all(getattr(hpml_compiler, name) is not None for name in hpml_compiler.__all__)
