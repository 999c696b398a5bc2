"""One rank alone calls something that needs all: it gets an error with the next step within seconds; the others too."""
from __future__ import annotations

import io
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.runtime.watchdog import barrier_check
from hpml_compiler.runtime.watchdog.attribution import Heartbeat
from hpml_compiler.runtime.watchdog.barrier_check import RankDiverged
from hpml_compiler.runtime.watchdog.heartbeat import RankLost
from hpml_compiler.runtime.watchdog.rank_status import RankStatus
from passes.session_state import state, state_of
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
    "full": (full_state, "alone in hpml_compiler.full_state_dict", "all ranks must call it"),
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
        with pytest.raises(RankDiverged, match=says) as error:
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


def send_alone(rank):
    model = net()
    step(compiled(model, {"tp": 2}), adamw(model))
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RankDiverged, match="tensor of the model that broadcast_object_list sends") as error:
            dist.broadcast_object_list([{"model": model.state_dict()}], src=0)
        assert time.monotonic() - start < 5
        return str(error.value)
    with pytest.raises(Exception):  # noqa: B017  # rank 0 ends now
        dist.broadcast_object_list([None], src=0)
    return ""


def test_one_rank_alone_sends_a_state_dict(launch):
    outcomes = launch(send_alone, timeout_s=55, check=False)
    assert "hpml_compiler.full_state_dict" in str(outcomes[0])


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
    before = state_of(RankStatus).meetings
    for _ in range(32):  # as in a model whose parts are graphs, of which some have no backward
        step(call, optimizer)
        evaluate(model, call, optimizer)
    return state_of(RankStatus).meetings - before


def test_all_together(launch):
    for meetings in launch(run_together):
        assert 2 <= meetings <= 8, "all ranks wait for each other the first times, and later now and then"


TOKENS = torch.arange(8) % 5
WRONG = TOKENS.clone()
WRONG[6] = 99  # in the rows of rank 1


class Table(nn.Module):
    """A lookup that fails by itself."""

    def __init__(self):
        super().__init__()
        self.table, self.end = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        return F.cross_entropy(self.end(self.table(tokens)), TOKENS)


def caught(call, optimizer, tokens):
    """A training step as of a script that leaves out what fails."""
    try:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
    except IndexError:
        return "failed"
    return loss.detach().clone()


def table(axis):
    torch.manual_seed(0)
    model = Table()
    return model, compiled(model, {axis: 2}), torch.optim.SGD(model.parameters(), lr=0.5)


def failing_on_one(rank, after):
    model, call, optimizer = table("dp")
    caught(call, optimizer, TOKENS)
    if rank == 0:
        with pytest.raises(RankLost, match="rank 1 is"):  # not a loss of two steps
            for _ in range(3):
                call(WRONG).backward()
        return ""
    with pytest.raises(IndexError):  # gradients of the step before are still there
        call(WRONG)
    start = time.monotonic()
    for _ in range(2):  # for good
        with pytest.raises(RankDiverged, match="this rank caught an error in forward of graph_0, call 2") as error:
            {"trains": lambda: caught(call, optimizer, TOKENS), "norm": lambda: look_at_a_value([model.end], call, optimizer),
             "clips": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
             "saves": lambda: save(model, call, optimizer)}[after]()
    assert time.monotonic() - start < 12
    return str(error.value)


@pytest.mark.parametrize("after", ["trains", "norm", "clips", "saves"])
def test_a_rank_that_failed_alone_does_not_go_on(launch, after):
    outcomes = launch(failing_on_one, args=(after,), timeout_s=55, check=False)
    assert outcomes[0] == "", str(outcomes[0])
    assert "restart all ranks" in str(outcomes[1])


def failing_on_all(rank):
    model, call, optimizer = table("tp")
    losses = [caught(call, optimizer, tokens) for tokens in (TOKENS, WRONG, TOKENS, WRONG, TOKENS)]
    torch.manual_seed(0)
    expected, plain = Table(), []
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5)
    for tokens in (TOKENS, WRONG, TOKENS, WRONG, TOKENS):
        plain.append(caught(expected, sgd, tokens))
    assert [isinstance(x, str) for x in losses] == [isinstance(x, str) for x in plain] == [False, True] * 2 + [False]
    for mine, other in zip(losses, plain, strict=True):
        if mine != "failed":
            torch.testing.assert_close(mine, other)


def test_ranks_that_all_failed_go_on(launch):
    launch(failing_on_all)


class OneOther:
    """A board of two ranks, on which the other one posts what it waits for."""

    world, rank, timeout_s = 2, 0, 30.0

    def __init__(self, record: Heartbeat, there: bool):
        self.record, self.there = record, there

    def add(self, key: str, amount: int) -> int:
        return 1 + self.there

    def records(self) -> dict[int, Heartbeat]:
        return {1: self.record}

    def forget(self, key: str) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("there", [False, True])
def test_a_rank_that_gave_up_is_still_seen_at_what_it_came_for(monkeypatch, there):
    """It may be back in the script, as in a barrier, before the other rank looks for the first time."""
    now = RankStatus()
    now.meetings = 3
    record = Heartbeat(1, "forward of graph_0", False, 0.0, 0.0, False, "", "", meetings=4, meets="reading output 1")
    monkeypatch.setitem(state._parts, RankStatus, now)
    monkeypatch.setitem(state._parts, barrier_check._LastCheck, barrier_check._LastCheck())
    monkeypatch.setattr(barrier_check, "LOOK_S", 0.0)
    monkeypatch.setattr(barrier_check.heartbeat, "board", lambda: OneOther(record, there))
    with nullcontext() if there else pytest.raises(RankDiverged, match="rank 1 is in reading output 1"):
        barrier_check.require_all_ranks("reading output 2")
    assert (now.meetings, now.meets) == (4, "" if there else "reading output 2")
