"""A rank that is killed, raises or sleeps -> the others' errors, in time."""
from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hpml_compiler.runtime.consistency.call_hooks import forward_call
from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.runtime.watchdog.heartbeat import RankLost
from hpml_compiler.runtime.watchdog.rank_status import Location, RankStatus, line_of_script
from passes.session_state import state_of

TIMEOUT_S = 8


def all_reduce(value):
    dist.all_reduce(value)
    return value


def run_trouble(rank, how):
    """Each call of the "graph" is a collective. The last rank does something else before the third call."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    heartbeat.start()
    call = forward_call(all_reduce, Location("forward of graph_0"), None)
    call(torch.ones(2))
    time.sleep(1.5)  # until all have posted
    call(torch.ones(2))
    if rank == dist.get_world_size() - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleeps":
            time.sleep(TIMEOUT_S + 5)
            return "slept"
        if how == "raises":
            try:
                with activity("loading a batch"):
                    raise ValueError("no such row")
            except ValueError:
                time.sleep(TIMEOUT_S + 5)
                return "caught"
    told = []
    if how == "sleeps":
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("hpml").addHandler(handler)
    start = time.monotonic()
    try:
        call(torch.ones(2))
    except RankLost as error:
        seconds = time.monotonic() - start
        late = "rank 1 is late: outside of compiled calls for"
        assert how != "sleeps" or late in told[0] and "has waited for" in told[0], told
        return str(error), seconds
    return "nobody was missed"


CASES = {
    "killed": (3, "rank 2 is not responding", "look at the exit code of rank 2"),
    "sleeps": (2, "rank 1 is late: outside of compiled calls for", "test_heartbeat.py:"),
    "raises": (2, "having caught ValueError: no such row", "look for work of a single rank"),
}


@pytest.mark.parametrize("how", CASES)
def test_the_others_name_the_rank(launch, how):
    world, *said = CASES[how]
    outcomes = launch(run_trouble, world, (how,), init=False, check=False)
    for rank in range(world - 1):
        text, seconds = outcomes[rank]
        assert all(part in text or f"rank {world - 1}" in text.splitlines()[0] and "reported by" in text for part in said), text
        assert f"where: rank {rank}, in forward of graph_0, call 3, all_reduce" in text
        assert seconds < TIMEOUT_S + 6
    assert said[0] in outcomes[0][0] or said[0] in outcomes[-2][0]


def test_other_errors_stay_what_they_are():
    def fails():
        raise KeyError("x")

    spot = Location("forward of graph_0")
    with pytest.raises(KeyError):
        forward_call(fails, spot, None)()
    status = state_of(RankStatus)
    assert status.at is spot and not status.inside and spot.calls == 1
    with pytest.raises(KeyError), activity("loading a batch"):
        assert status.place() == "in loading a batch"
        fails()
    assert status.at is spot


def test_the_line_of_the_script():
    assert line_of_script().startswith("test_heartbeat.py:") and line_of_script().endswith("in test_the_line_of_the_script")
