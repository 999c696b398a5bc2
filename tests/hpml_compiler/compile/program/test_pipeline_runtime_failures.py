"""Errors on one rank of a pipeline -> raised on all ranks within seconds, and the others can go on."""
from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._inductor.async_compile import AsyncCompile

import hpml_compiler
from hpml_compiler.compile.program.lowered_stages import CompiledStage
from hpml_compiler.runtime.program.pipeline_step import PipelineLoop
from hpml_compiler.runtime.program.stage_executor import StageExecutor
from passes.errors import HpmlError
from tests.hpml_compiler.compile.test_pipeline_parallel import Tied, batch

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
    whole = getattr(StageExecutor, name)

    def run(self, stage, microbatch):
        if (stage, microbatch) == (1, 2):
            setattr(StageExecutor, name, whole)
            what()
        whole(self, stage, microbatch)

    setattr(StageExecutor, name, run)


def in_stage(name, late):
    """One microbatch of a stage here fails once: at the beginning, or (late) when all is computed, collectives too."""
    whole = getattr(StageExecutor, name)

    def run(self, *args):
        if args[-1 if name != "_gradients" else 2] != 2:
            return whole(self, *args)
        setattr(StageExecutor, name, whole)
        if late:
            whole(self, *args)
        return broken()

    setattr(StageExecutor, name, run)


def before_the_loop():
    whole = PipelineLoop.segment

    def segment(self, half, when, values, at_once=False):
        PipelineLoop.segment = whole
        broken()

    PipelineLoop.segment = segment


def lowering():
    CompiledStage.calls = lambda self: broken()


def kernels():
    """As where the C++ compiler fails, which is known when its kernels are waited for."""
    AsyncCompile.wait = broken


CASES = {
    "forward": lambda: at_microbatch_2("_forward", broken), "backward": lambda: at_microbatch_2("_backward", broken),
    "killed": lambda: at_microbatch_2("_forward", killed), "before": before_the_loop, "lowering": lowering,
    "kernels": kernels,
}
COMPILING = ("lowering", "kernels")


def step(model, call):
    out = call(*batch())
    loss = out[0] if isinstance(out, tuple) else out.square().mean()
    loss.backward()
    return loss.detach()


def failing(rank, kind, how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = kind(0.0)
    call = torch.compile(model, backend="hpml", options={**OPTIONS, **({"compiler": "inductor"} if how == "kernels" else {})})
    if how not in COMPILING:
        expected = step(model, call)
        time.sleep(2.5 if how == "killed" else 0)  # until both have posted what they do
    if rank == 1:
        CASES[how]()
    start = time.monotonic()
    try:
        step(model, call)
    except Exception as error:
        said, seconds = str(error), time.monotonic() - start
        if how not in ("killed", *COMPILING):
            torch.testing.assert_close(step(model, call), expected)
        return said, seconds
    return "nothing was said", 0.0


@pytest.mark.parametrize(("kind", "how", "said"), [
    (Tied, "forward", "rank 1: forward of stage 1, microbatch 2 failed: ValueError: broken on purpose"),
    (Tied, "backward", "rank 1: backward of stage 1, microbatch 2 failed: ValueError: broken on purpose"),
    (Outside, "backward", "rank 1: backward of stage 1, microbatch 2 failed: ValueError: broken on purpose"),
    (Tied, "before", "rank 1: the graph before the first microbatch failed: ValueError: broken on purpose"),
    (Tied, "lowering", "broken on purpose"),
    (Tied, "kernels", "broken on purpose"),
    (Tied, "killed", "rank 1 is not responding"),
])
def test_all_ranks_say_the_same_at_once(launch, kind, how, said):
    outcomes = launch(failing, 2, (kind, how), init=False, check=False, timeout_s=110)
    for rank, outcome in enumerate(outcomes[:1] if how == "killed" else outcomes):
        text, seconds = outcome
        assert said in text, text
        assert "rank 1" in text or rank == 1, text
        assert seconds < TIMEOUT_S or how == "kernels", "those of the other ranks are compiled meanwhile"
        assert how not in COMPILING or rank == 1 or "rank 1 could not compile its pipeline stages" in text, text
    hpml_compiler.reset()


SPLIT = {  # how rank 2 of 4 fails -> what all say
    "forward": (lambda: in_stage("_forward", False), "rank 2: forward of stage 1, microbatch 2 failed"),
    "forward, late": (lambda: in_stage("_forward", True), "rank 2: forward of stage 1, microbatch 2 failed"),
    "backward": (lambda: in_stage("_gradients", False), "rank 2: backward of stage 1, microbatch 2 failed"),
    "backward, late": (lambda: in_stage("_gradients", True), "rank 2: backward of stage 1, microbatch 2 failed"),
    "backward_input": (lambda: in_stage("_gradients", True), "rank 2: backward_input of stage 1, microbatch 2 failed"),
    "weight": (lambda: in_stage("_backward_weight", False), "rank 2: backward_weight of stage 1, microbatch 2 failed"),
    "before": (before_the_loop, "rank 2: the graph before the first microbatch failed"),
}


def failing_where_stages_are_split(rank, axis, schedule, kind, hows):
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model = kind(0.0)
    call = torch.compile(model, backend="hpml", options={
        "mesh": {"pp": 2, axis: 2}, "microbatches": 4, "schedule": schedule, "compiler": "eager"})
    expected, said = step(model, call), []
    for how in hows:
        if rank == 2:
            SPLIT[how][0]()
        start = time.monotonic()
        try:
            step(model, call)
        except ValueError as error:  # what the stage raised, on all ranks
            assert isinstance(error, HpmlError) and error.rank == 2 and error.args == ("broken on purpose",)
            assert (error.stage, error.microbatch) == ((None, None) if how == "before" else (1, 2))
            said.append((how, str(error), time.monotonic() - start))
        torch.testing.assert_close(step(model, call), expected)
    return said


@pytest.mark.parametrize(("axis", "schedule", "kind", "hows"), [
    ("tp", "1f1b", Tied, ("forward", "forward, late", "backward", "backward, late", "before")),
    ("tp", "zero_bubble", Tied, ("backward_input", "weight")),
    ("dp", "gpipe", Outside, ("forward", "backward, late")),
])
def test_ranks_that_share_a_stage_with_one_that_fails_do_not_wait_for_it(launch, axis, schedule, kind, hows):
    outcomes = launch(failing_where_stages_are_split, 4, (axis, schedule, kind, hows), init=False, timeout_s=110)
    for said in outcomes:
        assert [how for how, *_ in said] == list(hows)
        for how, text, seconds in said:
            assert f"{SPLIT[how][1]}: ValueError: broken on purpose" in text
            assert seconds < TIMEOUT_S / 2


def dying_where_stages_are_split(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    call = torch.compile(model := Tied(0.0), backend="hpml", options={
        "mesh": {"pp": 2, "tp": 2}, "microbatches": 4, "compiler": "eager"})
    step(model, call)
    time.sleep(2.5)  # until all have posted what they do
    if rank == 2:
        at_microbatch_2("_forward", killed)
    start = time.monotonic()
    try:
        step(model, call)
    except Exception as error:
        return str(error), time.monotonic() - start
    return "nothing was said", 0.0


def test_a_rank_that_dies_where_stages_are_split_is_named(launch):
    outcomes = launch(dying_where_stages_are_split, 4, (), init=False, check=False, timeout_s=110)
    for rank in (0, 1, 3):
        text, seconds = outcomes[rank]
        assert "rank 2 is not responding" in text, text
        assert seconds < TIMEOUT_S + 5
