"""What goes wrong on one rank of a pipeline -> what all of them say, within seconds, and that those left can go on."""
from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hpml_compiler
from hpml_compiler.compile.stages import LoweredStage
from hpml_compiler.runtime.pipelined import Pipelined
from hpml_compiler.runtime.stages import Run
from tests.hpml_compiler.compile.test_pipelined import Tied, batch

TIMEOUT_S = 20
OPTIONS = {"mesh": {"pp": 2}, "microbatches": 4, "compiler": "eager"}


class Outside(Tied):
    """The loss is computed by the script."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels)[1]


def broken(*_):
    raise ValueError("broken on purpose")


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def at_microbatch_2(name, what):
    """Stage 1 does that once."""
    whole = getattr(Run, name)

    def run(self, stage, microbatch):
        if (stage, microbatch) == (1, 2):
            setattr(Run, name, whole)
            what()
        whole(self, stage, microbatch)

    setattr(Run, name, run)


def before_the_loop():
    whole = Pipelined.segment

    def segment(self, half, when, values):
        Pipelined.segment = whole
        broken()

    Pipelined.segment = segment


def lowering():
    LoweredStage.calls = lambda self: broken()


CASES = {
    "forward": lambda: at_microbatch_2("_forward", broken), "backward": lambda: at_microbatch_2("_backward", broken),
    "killed": lambda: at_microbatch_2("_forward", killed), "before": before_the_loop, "lowering": lowering,
}


def step(model, call):
    out = call(*batch())
    loss = out[0] if isinstance(out, tuple) else out.square().mean()
    loss.backward()
    return loss.detach()


def failing(rank, kind, how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = kind(0.0)
    call = torch.compile(model, backend="hpml", options=OPTIONS)
    if how != "lowering":
        expected = step(model, call)
        time.sleep(2.5 if how == "killed" else 0)  # until both have posted what they do
    if rank == 1:
        CASES[how]()
    start = time.monotonic()
    try:
        step(model, call)
    except Exception as error:
        said, seconds = str(error), time.monotonic() - start
        if how not in ("killed", "lowering"):
            torch.testing.assert_close(step(model, call), expected)
        return said, seconds
    return "nothing was said", 0.0


@pytest.mark.parametrize(("kind", "how", "said"), [
    (Tied, "forward", "rank 1: forward of stage 1, microbatch 2 failed: ValueError: broken on purpose"),
    (Tied, "backward", "rank 1: backward of stage 1, microbatch 2 failed: ValueError: broken on purpose"),
    (Outside, "backward", "rank 1: backward of stage 1, microbatch 2 failed: ValueError: broken on purpose"),
    (Tied, "before", "rank 1: what is done before the first microbatch failed: ValueError: broken on purpose"),
    (Tied, "lowering", "broken on purpose"),
    (Tied, "killed", "rank 1 is gone without a word"),
])
def test_all_ranks_say_the_same_at_once(launch, kind, how, said):
    outcomes = launch(failing, 2, (kind, how), init=False, check=False, timeout_s=110)
    for rank, outcome in enumerate(outcomes[:1] if how == "killed" else outcomes):
        text, seconds = outcome
        assert said in text, text
        assert "rank 1" in text or rank == 1, text
        assert seconds < TIMEOUT_S
    hpml_compiler.reset()
