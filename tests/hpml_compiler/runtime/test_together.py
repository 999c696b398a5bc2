"""One rank alone does what needs all: it hears so within seconds, and what to do instead; the others hear who failed."""
from __future__ import annotations

import io
import time

import pytest
import torch
import torch.distributed as dist

import hpml_compiler
from hpml_compiler.runtime.together import Alone
from tests.hpml_compiler.test_scripts import X, adamw, compiled, net, step


def save(model, call, optimizer):
    torch.save(model.state_dict(), io.BytesIO())


def look_at_a_value(model, call, optimizer):
    model[0].weight.norm().item()


def evaluate(model, call, optimizer):
    with torch.no_grad():
        call(X[:2])


def full_state(model, call, optimizer):
    hpml_compiler.full_state_dict(model)


ALONE = {
    "save": (save, "alone in saving or copying", "full_state_dict"),
    "value": (look_at_a_value, "alone in gathering", "if rank == 0"),
    "evaluate": (evaluate, "alone in calling the model", "evaluation out of"),
    "full": (full_state, "alone in hpml_compiler.full_state_dict", "all ranks call it"),
}


def run_alone(rank, kind, others):
    action, says, remedy = ALONE[kind]
    model = net()
    call = compiled(model, {"tp": 2})
    optimizer = adamw(model)
    step(call, optimizer)
    evaluate(model, call, optimizer)
    for _ in range(18):
        step(call, optimizer)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(Alone, match=says) as error:
            action(model, call, optimizer)
        assert time.monotonic() - start < 15
        assert remedy in str(error.value) and "rank 1 is" in str(error.value), str(error.value)
        return str(error.value)
    with pytest.raises(Exception):  # noqa: B017  # of whatever it waits in; rank 0 ends now
        step(call, optimizer) if others == "trains" else dist.barrier()
    return ""


CASES = [("save", "trains"), ("value", "waits"), ("evaluate", "trains"), ("full", "waits")]


@pytest.mark.parametrize(("kind", "others"), CASES)
def test_one_rank_alone(launch, kind, others):
    outcomes = launch(run_alone, args=(kind, others), timeout_s=55, check=False)
    assert isinstance(outcomes[0], str), str(outcomes[0])


def run_together(rank):
    model = net()
    call = compiled(model, {"tp": 2})
    optimizer = adamw(model)
    for _ in range(2):
        step(call, optimizer)
        time.sleep(1.5 * rank)  # one rank comes later: the other waits
        save(model, call, optimizer)
        evaluate(model, call, optimizer)
        look_at_a_value(model, call, optimizer)
        full_state(model, call, optimizer)
    start = time.perf_counter()
    for _ in range(20):
        full_state(model, call, optimizer)
    return (time.perf_counter() - start) / 20 * 1e3


def test_all_together(launch):
    launch(run_together)
